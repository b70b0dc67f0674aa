"""Signatures of policy records: proof that a holder of the key wrote this record for its key.

A record header carries an HMAC-SHA256 (RFC 2104) under ``HVD_KAFKA_POLICY_KEY`` over the record's
key and value. It is verified before the value is parsed. A signature carries no time: the
publication number decides between two genuine records.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final

HEADER: Final = "signature"


def signed(secret: str, key: bytes, value: bytes | None) -> list[tuple[str, bytes]]:
    """The signature header of a record; empty without a ``secret``."""
    return [(HEADER, _signature(secret, key, value))] if secret else []


def is_genuine(secret: str, record: Any) -> bool:
    """Whether a kafka-python record was signed under ``secret``; always true without a secret."""
    if not secret:
        return True
    headers: Sequence[tuple[str, bytes | None]] = record.headers or ()
    given = [value or b"" for name, value in headers if name == HEADER]
    expected = _signature(secret, record.key or b"", record.value)
    return len(given) == 1 and hmac.compare_digest(given[0], expected)


def _signature(secret: str, key: bytes, value: bytes | None) -> bytes:
    """Hexadecimal, since headers are text. A missing value differs from an empty one."""
    message = b"%d:%b%b" % (len(key), key, b"-" if value is None else b"+" + value)
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest().encode()
