"""Loopback addresses: requests to this machine use no proxy, whatever the environment sets."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Whether ``url`` names this machine; False where it is no URL."""
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    return False
