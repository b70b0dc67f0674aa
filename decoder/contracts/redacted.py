"""Secrets that stand in addresses, taken out of whatever is shown: errors, logs, pages, reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_PLACE: Final = re.compile(r"(?<=://)[^\s'\"<>]*")
"""Taken whole: to look for an ``@`` from each of many ``://`` takes a text's length squared."""
_ASKED: Final = re.compile(
    r"(?i)([?&;][\w.-]*(?:password|passwd|pwd|secret|token|signature|credential|key|sig)=)"
    r"[^\s&;'\"<>]+"
)


_SECRET: Final = re.compile(r"(?i)(PASSWORD|SECRET|TOKEN|KEY)$")


def redacted(text: str) -> str:
    """``text`` with ``***`` in place of who logs in at an address, and of secrets it asks with.

    More goes than must where a path has an ``@``: a password may hold any letter, ``/`` and ``@``
    too, if nobody has quoted them.
    """
    return _ASKED.sub(r"\1***", _PLACE.sub(lambda found: _host(found[0], "***@"), text))


def told(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables as a report may show them, by name."""
    return {
        name: "***" if _SECRET.search(name) else redacted(value)
        for name, value in sorted(variables.items())
    }


def for_anybody(address: str) -> str:
    """``address`` without who logs in, as a link for those who log in as themselves."""
    return _PLACE.sub(lambda found: _host(found[0], ""), address)


def _host(place: str, user: str) -> str:
    """``place`` of an address with ``user`` in place of who logs in there, if anybody does."""
    _, anybody, host = place.rpartition("@")
    return user + host if anybody else host
