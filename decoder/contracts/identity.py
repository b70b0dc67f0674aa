"""Pseudonyms for names in telemetry: only the operator's key links them to what a client sent.

A pseudonym is an HMAC-SHA256 (RFC 2104), truncated to 96 bits. Whoever holds the key can compute it
from a name, and so join telemetry to their own records. Nobody else can recover the name. The kind
is part of the input: a tenant and a session of the same name have different pseudonyms.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Final, Literal

Named = Literal["request", "tenant", "session", "salt", "workload"]

DIGITS: Final = 24  # hexadecimal digits of a pseudonym: at 96 bits, a billion names do not collide


class Pseudonyms:
    """The pseudonyms under one key. Without a key, a random one is used until the process ends."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)

    def of(self, kind: Named, name: str) -> str:
        """The ``DIGITS`` hexadecimal digits of ``name``'s pseudonym; "" for an empty name."""
        if not name:
            return ""
        message = f"{kind}\0{name}".encode(errors="surrogatepass")
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()[:DIGITS]

    def workload(self, name: str) -> str:
        """``name`` itself if it is readable (see :func:`is_readable`), else its pseudonym."""
        return name if is_readable(name) else self.of("workload", name)


def is_pseudonym(name: str) -> bool:
    """Whether ``name`` has the form of a pseudonym."""
    return _PSEUDONYM.fullmatch(name) is not None


def is_readable(name: str) -> bool:
    """Whether a workload's name may appear in telemetry as it is, for people to read in a chart.

    A readable name is a short lower-case word with at most four digits: enough to name a kind of
    traffic, too little for an address, a key, a person's number, or a sentence.
    """
    return _READABLE.fullmatch(name) is not None


_PSEUDONYM: Final = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
_READABLE: Final = re.compile(r"(?!(?:[^0-9]*[0-9]){5})[a-z][a-z0-9._-]{0,31}")
