"""Record batches made by hand, sound and damaged, put onto a broker as they are."""

from __future__ import annotations

import gzip
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

import crc32c
import lz4.frame
import snappy
import zstandard

from decoder.contracts.settings import KafkaSettings
from tests import frames

PRODUCE, VERSION = 0, 7
CODECS: Final = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
CONTROL: Final = 0x20
_PACK: Final = {
    "none": bytes, "gzip": gzip.compress, "snappy": snappy.compress, "lz4": lz4.frame.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}  # fmt: skip


def varint(number: int) -> bytes:
    """Zigzag, as records have it."""
    left, found = (number << 1) ^ (number >> 63), bytearray()
    left &= (1 << 64) - 1
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def nullable(value: bytes | None) -> bytes:
    """A key or value with its length."""
    return varint(-1) if value is None else varint(len(value)) + value


def record(
    offset: int,
    value: bytes | None,
    key: bytes | None = None,
    tail: bytes = varint(0),
    late: int = 0,
) -> bytes:
    """One of a batch: ``offset`` and ``late`` (ms) beyond its first, ``tail`` in headers' place."""
    body = b"\0" + varint(late) + varint(offset) + nullable(key) + nullable(value) + tail
    return varint(len(body)) + body


def packed(codec: str, payload: bytes) -> bytes:
    """``payload`` as a batch of ``codec`` holds it."""
    return _PACK[codec](payload)  # type: ignore[operator]


def batch(
    payload: bytes,
    count: int,
    attributes: int = 0,
    last: int | None = None,
    stamp: int | None = None,
    magic: int = 2,
    crc: int | None = None,
    length: int | None = None,
) -> bytes:
    """A batch around ``payload``, which holds ``count`` records; its CRC is right unless given.

    ``stamp`` is of now unless given: a broker removes what is old.
    """
    stamp = int(time.time() * 1e3) if stamp is None else stamp
    tail = (
        struct.pack(
            ">hiqqqhii", attributes, count - 1 if last is None else last, stamp, stamp, -1, -1, -1,
            count,
        )
        + payload
    )  # fmt: skip
    summed = crc32c.crc32c(tail) if crc is None else crc
    head = struct.pack(">ibI", 0, magic, summed)
    size = len(head) + len(tail) if length is None else length
    return struct.pack(">qi", 0, size) + head + tail


def sound(values: Sequence[bytes | None], codec: str = "none", stamp: int | None = None) -> bytes:
    """A batch in order."""
    payload = b"".join(record(at, value) for at, value in enumerate(values))
    return batch(packed(codec, payload), len(values), CODECS[codec], stamp=stamp)


def put(kafka: KafkaSettings, topic: str, *batches: bytes, partition: int = 0) -> list[int]:
    """Have the broker store ``batches``, a request each; its error codes."""
    host, _, port = kafka.bootstrap_servers.partition(",")[0].rpartition(":")
    codes = []
    with socket.create_connection((host, int(port)), timeout=300.0) as sock:
        for each in batches:
            name = topic.encode()
            frames.write(
                sock,
                struct.pack(">hhih", PRODUCE, VERSION, 1, -1)
                + struct.pack(">hhii", -1, 1, 60_000, 1)
                + struct.pack(">h", len(name))
                + name
                + struct.pack(">iii", 1, partition, len(each))
                + each,
            )
            answer = frames.read(sock)
            at = 4 + 4 + 2 + len(name) + 4 + 4
            codes += struct.unpack_from(">h", answer, at)
    return codes
