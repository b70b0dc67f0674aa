"""Masks secrets in addresses wherever text is shown: errors, logs, pages, reports."""

from __future__ import annotations

import re
from typing import Final

_AUTHORITY: Final = re.compile(
    r"(?<=://)(?:"
    r"[^\s'\"<>/:@\[]*:(?!\d{1,5}(?:[\s'\"<>,;)/?#]|$))(?:(?!://)[^\n]){0,256}?"
    r"@[^\s'\"<>@]*(?=[\s'\"<>]|$)"
    r"|[^\s'\"<>]*)"
)
"""First an address with a password, which may hold spaces and quotes, unless a port stands in its
place; its length is bounded, for to look for an ``@`` after each of many ``://`` takes quadratic
time. Else what stands before a space or a quote."""
_SECRET_PARAMETER: Final = re.compile(
    r"(?i)([?&;][\w.-]*(?:password|passwd|pwd|secret|token|signature|credential|key|sig)=)"
    r"[^\s&;'\"<>]+"
)


def masked(text: str) -> str:
    """``text`` with ``***`` in place of the user information of URLs and of secret parameters.

    A path with an ``@`` loses more than it must: an unquoted password may hold any character,
    ``/`` and ``@`` included.
    """
    return _SECRET_PARAMETER.sub(r"\1***", _AUTHORITY.sub(lambda m: _host(m[0], "***@"), text))


def without_login(address: str) -> str:
    """``address`` without user information, for links that each reader follows as themselves."""
    return _AUTHORITY.sub(lambda m: _host(m[0], ""), address)


def _host(authority: str, user: str) -> str:
    """``authority`` with ``user`` in place of its user information, if it has any."""
    _, separator, host = authority.rpartition("@")
    return user + host if separator else host
