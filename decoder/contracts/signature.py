"""Signatures of policies on their topic: who holds the key made this record, for this key of it.

An HMAC-SHA256 (RFC 2104) under ``HVD_KAFKA_POLICY_KEY``, in a header of the record, over the
record's key and the whole of its value: it is checked before a byte of the value is read. A
signature does not say when: of two genuine publications the lower number gives way.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final

HEADER: Final = "signature"
SHORTEST: Final = 16
"""Characters of a key; a shorter one could be found by trying."""


def signed(secret: str, key: bytes, value: bytes | None) -> list[tuple[str, bytes]]:
    """The header that proves a record of ``key`` and ``value``; none without a ``secret``."""
    return [(HEADER, _signature(secret, key, value))] if secret else []


def is_genuine(secret: str, record: Any) -> bool:
    """Whether a record as kafka-python hands it out was signed under ``secret``; without one,
    nothing is asked for."""
    if not secret:
        return True
    headers: Sequence[tuple[str, bytes | None]] = record.headers or ()
    told = [value or b"" for name, value in headers if name == HEADER]
    made = _signature(secret, record.key or b"", record.value)
    return len(told) == 1 and hmac.compare_digest(told[0], made)


def _signature(secret: str, key: bytes, value: bytes | None) -> bytes:
    """Hexadecimal, so that headers stay text. What has no value is told from an empty one."""
    told = b"%d:%b%b" % (len(key), key, b"-" if value is None else b"+" + value)
    return hmac.new(secret.encode(), told, hashlib.sha256).hexdigest().encode()
