"""Proxies of HTTP clients, which the environment sets; none for this machine."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from decoder.contracts.loopback import is_loopback

_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_VARIABLES: Final = ("no_proxy", "NO_PROXY")
"""Both are set, since clients differ in which they read."""


def exempt(environment: MutableMapping[str, str]) -> None:
    """Exempt this machine from proxies, for clients that read ``environment``. Mutates it."""
    listed = ",".join(environment.get(name, "") for name in _VARIABLES).split(",")
    hosts = dict.fromkeys([*filter(None, map(str.strip, listed)), *_HOSTS])
    environment.update(dict.fromkeys(_VARIABLES, "*" if "*" in hosts else ",".join(hosts)))


def proxy_of(url: str) -> str:
    """The proxy that this process's environment names for the HTTP address ``url``, or ""."""
    from urllib.request import getproxies, proxy_bypass  # late: 40 ms

    with suppress(ValueError):
        parts, proxies = urlsplit(url), getproxies()
        host = parts.hostname or ""
        if parts.scheme in ("http", "https") and not (is_loopback(url) or proxy_bypass(host)):
            return proxies.get(parts.scheme) or proxies.get("all", "")
    return ""
