"""Names that leave the worker: pseudonyms under the operator's key, never what a client wrote.

A pseudonym is an HMAC-SHA256 (RFC 2104), cut to 96 bits: whoever holds the key can compute it from
the name and so join telemetry to their own records; nobody else can go back to the name. Kinds are
kept apart, so that a tenant and a session of one name have different pseudonyms.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Final, Literal

Named = Literal["request", "tenant", "session", "salt", "workload"]

DIGITS: Final = 24
"""Hexadecimal digits of a pseudonym: 96 bits, so that a billion names have no two alike."""


class Pseudonyms:
    """The pseudonyms of one key. Without a key, of a random one that ends with the process."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)

    def of(self, kind: Named, name: str) -> str:
        """``DIGITS`` hexadecimal digits that stand for ``name``; "" stands for itself."""
        if not name:
            return ""
        told = f"{kind}\0{name}".encode(errors="surrogatepass")
        return hmac.new(self._key, told, hashlib.sha256).hexdigest()[:DIGITS]

    def workload(self, name: str) -> str:
        """``name`` itself where it may be read by anybody (:func:`is_readable`), or what stands
        for it."""
        return name if is_readable(name) else self.of("workload", name)


def is_pseudonym(name: str) -> bool:
    """Whether ``name`` has the form of a pseudonym."""
    return _PSEUDONYM.fullmatch(name) is not None


def is_readable(name: str) -> bool:
    """Whether a workload's name may stand in telemetry as it is, for people to read in a chart.

    A short lower-case word, digits at most four: what a person would call a kind of traffic, and
    what no address, key, number of a person, or sentence fits into.
    """
    return _READABLE.fullmatch(name) is not None


_PSEUDONYM: Final = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
_READABLE: Final = re.compile(r"(?!(?:[^0-9]*[0-9]){5})[a-z][a-z0-9._-]{0,31}")
