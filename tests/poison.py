"""Whatever anybody may write onto our topics: batches that nobody can unpack, and records of any
size, key and stamp that are nobody's.
"""

from __future__ import annotations

from typing import Final

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import TOPICS
from tests import raw_batches as raw
from tests.mock_cluster.test_damaged import CASES

WORST: Final = (
    "garbage, none", "garbage, gzip", "truncated, gzip", "garbage, snappy", "garbage, lz4",
    "garbage, zstd", "too many, none", "endless headers, none", "a header without name, none",
    "count negative, none", "codec 7", "an exabyte of lz4",
)  # fmt: skip
HEADER: Final = raw.varint(1) + raw.nullable(b"hvd-signature") + raw.varint(-1)
VALUES: Final = (None, b"", b"null", b"[" * 5_000, b"\xff" * 100, b'{"contract": "hvd.drafts.v2"}')
KEYS: Final = (None, b"", b"\xff\xfe", b"k" * 30_000, b"any/first", b"scope", b"scope/jester")


def batches(keyed: bool) -> list[bytes]:
    """Of them, with stamps of seconds, microseconds and no clock among them; unreadable first."""
    records = [(key, value) for key in KEYS[keyed:] for value in VALUES]
    payload = b"".join(
        raw.record(at, value, key, HEADER) for at, (key, value) in enumerate(records)
    )
    stamps = (None, 10**15, 2**62)
    small = raw.packed("gzip", payload)
    gzip = raw.CODECS["gzip"]
    strange = [raw.batch(small, len(records), gzip, stamp=stamp) for stamp in stamps]
    return [CASES[name]() for name in WORST] + strange


def poison(kafka: KafkaSettings) -> None:
    """Put all of it onto every topic."""
    for topic in TOPICS:
        codes = raw.put(kafka, topic.name, *batches(topic.compacted))
        # a broker that compacts takes no record without a key that it sees
        assert not any(codes) or (topic.compacted and not any(codes[-3:])), codes
