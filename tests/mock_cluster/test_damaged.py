"""A record batch of any bytes costs its readers that batch at most: codecs times damages."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from itertools import product
from typing import Any, Final

import lz4.frame
import pytest
from kafka import TopicPartition

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.kafka import clients
from decoder.kafka.clients import close, fetch, open_consumer
from decoder.kafka.codec import MAX_BYTES, Unreadable
from decoder.limited_log import LimitedLog
from tests import raw_batches as raw
from tests.conftest import until
from tests.decoder.telemetry import broker
from tests.mock_cluster.cluster import FETCH, running

RECORDS: Final = [raw.record(at, b"value" * 9, b"key") for at in range(3)]
PAYLOAD: Final = b"".join(RECORDS)
HUGE: Final = 2**31 - 1


def whole(codec: str, payload: bytes = PAYLOAD, **changes: Any) -> bytes:
    return raw.batch(
        raw.packed(codec, payload), **{"count": 3, **changes}, attributes=raw.CODECS[codec]
    )


def unpackable(codec: str, payload: bytes) -> bytes:
    return raw.batch(payload, 3, raw.CODECS[codec])


def last(*parts: bytes) -> bytes:
    """Two sound records, and one of ``parts``."""
    body = b"".join(parts)
    return b"".join(RECORDS[:2]) + raw.varint(len(body)) + body


HEAD: Final = b"\0" + raw.varint(0) + raw.varint(2)
DAMAGES: Final[dict[str, Callable[[str], bytes]]] = {
    "garbage": lambda codec: unpackable(codec, b"\xff\x07" * 40),
    "zeros": lambda codec: unpackable(codec, bytes(90)),
    "nothing": lambda codec: unpackable(codec, b""),
    "truncated": lambda codec: unpackable(codec, raw.packed(codec, PAYLOAD)[:-9]),
    "cut early": lambda codec: unpackable(codec, raw.packed(codec, PAYLOAD)[:11]),
    "too many": lambda codec: whole(codec, count=9, last=2),
    "too few": lambda codec: whole(codec, count=1, last=2),
    "offsets of another batch": lambda codec: whole(codec, PAYLOAD * 2, count=6),
    "offset leaps": lambda codec: whole(codec, RECORDS[0] + raw.record(HUGE, b""), count=2, last=2),
    "offset falls": lambda codec: whole(codec, RECORDS[0] + raw.record(-4, b""), count=2, last=2),
    "negative record": lambda codec: whole(codec, PAYLOAD[: len(RECORDS[0]) * 2] + raw.varint(-7)),
    "endless key": lambda codec: whole(codec, last(HEAD, raw.varint(HUGE), b"k")),
    "endless value": lambda codec: whole(codec, last(HEAD, raw.varint(-1), raw.varint(2**62))),
    "endless headers": lambda codec: whole(
        codec, last(HEAD, raw.varint(-1), raw.varint(-1), raw.varint(2**62), bytes(500))
    ),
    "many headers": lambda codec: whole(
        codec, last(HEAD, raw.varint(-1), raw.varint(-1), raw.varint(10**6), b"\0\1" * 10**5)
    ),
    "negative headers": lambda codec: whole(
        codec, last(HEAD, raw.varint(-1), raw.varint(-1), raw.varint(-3))
    ),
    "a header without name": lambda codec: whole(
        codec, last(HEAD, raw.varint(-1), raw.varint(-1), raw.varint(1), raw.varint(2), b"\xff\xfe")
    ),
    "more than 64 bits": lambda codec: whole(codec, b"\xff" * 40),
    "last offset negative": lambda codec: whole(codec, last=-5),
    "last offset too low": lambda codec: whole(codec, last=0),
    "count negative": lambda codec: whole(codec, count=-3, last=2),
}
FRAMING: Final[dict[str, Callable[[str], bytes]]] = {
    "sum": lambda codec: whole(codec, crc=7),
    "format to come": lambda codec: whole(codec, magic=3),
    "length too long": lambda codec: whole(codec, length=HUGE),
    "length too short": lambda codec: whole(codec, length=20),
    "length negative": lambda codec: whole(codec, length=-20),
    "length zero": lambda codec: whole(codec, length=0),
}
BOMB: Final = raw.varint(MAX_BYTES * 2) + bytes(MAX_BYTES + 1)
ABSURD: Final = {
    "bomb of gzip": partial(whole, "gzip", BOMB),
    "bomb of lz4": partial(whole, "lz4", BOMB),
    "bomb of zstd": partial(whole, "zstd", BOMB),
    "bomb of snappy": partial(whole, "snappy", BOMB),
    "four gigabytes of snappy": partial(unpackable, "snappy", b"\xff\xff\xff\xff\x0f" + bytes(20)),
    "an endless length of snappy": partial(unpackable, "snappy", b"\xff" * 30),
    "a frame of snappy that goes back": partial(
        unpackable, "snappy", b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, -4) + bytes(9)
    ),
    "an exabyte of lz4": partial(
        unpackable, "lz4", lz4.frame.LZ4FrameCompressor().begin(source_size=2**60) + bytes(20)
    ),
    "an exabyte of zstd": partial(
        unpackable, "zstd", b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**60) + bytes(20)
    ),
    **{f"codec {n}": partial(raw.batch, PAYLOAD, 3, n) for n in (5, 6, 7)},
}
CASES: Final = {
    **{f"{d}, {c}": partial(DAMAGES[d], c) for d, c in product(DAMAGES, raw.CODECS)},
    **ABSURD,
}
FRAMED: Final = {f"{d}, {c}": partial(FRAMING[d], c) for d, c in product(FRAMING, raw.CODECS)}
TOPIC: Final = DRAFTS.name
PLACE: Final = TopicPartition(TOPIC, 0)


class Reader:
    """A consumer for all that a broker is given, from the end on."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.kafka = kafka
        self.consumer = open_consumer(kafka, "test")
        self.consumer.assign([PLACE])
        self.consumer.seek_to_end(PLACE)
        self.consumer.position(PLACE)

    def read(self, *batches: bytes, holes: bool = False) -> tuple[list[Any], list[Unreadable]]:
        """What is handed on of ``batches``, and what is passed over: together all that lies there,
        each offset once, but for ``holes`` as compaction leaves them."""
        begin, found, passed = self.consumer.position(PLACE), [], []  # type: ignore[var-annotated]
        assert not any(raw.put(self.kafka, TOPIC, *batches))
        (end,) = self.consumer.end_offsets([PLACE]).values()

        def there() -> bool:
            found.extend(fetch(self.consumer, 100, passed.append))
            return bool(self.consumer.position(PLACE) >= end)

        until(there, "the end of the topic")
        spans = [(r.offset, r.offset + 1) for r in found] + [(p.offset, p.upto) for p in passed]
        for first, upto in sorted(spans):
            assert begin == first or (holes and begin < first), (
                "none is lost in silence, and none comes twice"
            )
            begin = upto
        assert begin == end and all(batch.place == PLACE for batch in passed)
        return found, passed


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Of the embedded broker, which looks at a batch's frame and sum, and at nothing in it."""
    with broker.running(tmp_path_factory.mktemp("broker")) as kafka:
        made = Reader(kafka)
        yield made
        close(made.consumer)


@pytest.fixture(scope="module")
def mock() -> Iterator[Reader]:
    """Of a broker that stores what comes."""
    with running() as cluster:
        made = Reader(cluster.kafka)
        yield made
        close(made.consumer)


BEFORE, BEHIND = raw.sound([b"before"]), raw.sound([b"behind"])


def check(reader: Reader, damaged: bytes, said: str) -> list[Unreadable]:
    found, passed = reader.read(BEFORE, damaged, BEHIND)
    values = [record.value for record in found]
    assert (values[0], values[-1]) == (b"before", b"behind")
    assert set(values[1:-1]) <= {b"value" * 9}
    assert not passed or said
    return passed


@pytest.fixture(autouse=True)
def said_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_limited_log", LimitedLog())


@pytest.mark.parametrize("case", CASES)
def test_an_undecodable_batch_hides_no_later_one(
    embedded: Reader, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    passed = check(embedded, CASES[case](), case)
    assert passed and f"partition 0, offset {passed[0].offset}" in caplog.text
    assert TOPIC in caplog.text


@pytest.mark.parametrize("case", FRAMED)
def test_a_damaged_frame_hides_no_later_batch(mock: Reader, case: str) -> None:
    check(mock, FRAMED[case](), case)


def test_random_bytes_hide_no_later_batch(embedded: Reader) -> None:
    draw = random.Random(5)
    for codec in raw.CODECS:
        damaged = []
        for _ in range(60):
            payload = bytearray(raw.packed(codec, PAYLOAD))
            for _ in range(draw.randint(1, 4)):
                payload[draw.randrange(len(payload))] = draw.randrange(256)
            attributes, count = raw.CODECS[codec], draw.choice([3, 3, 2, -1, 10**6])
            damaged.append(raw.batch(bytes(payload), count, attributes, draw.choice([2, 2, 0, -1])))
        found, _ = embedded.read(BEFORE, *damaged, BEHIND, holes=True)
        assert found[-1].value == b"behind"


@pytest.mark.parametrize("codec", raw.CODECS)
def test_valid_batches_are_read_completely(embedded: Reader, codec: str) -> None:
    values = [b"one", None, b"", b"four" * 90_000]
    found, passed = embedded.read(raw.sound(values, codec), BEHIND)
    assert [r.value for r in found] == [*values, b"behind"] and not passed
    told = raw.record(
        0, b"v", b"k", raw.varint(1) + raw.nullable(b"name") + raw.nullable(b"\xff"), 7
    )
    stamp = int(time.time()) * 1_000
    sent = raw.batch(raw.packed(codec, told), 1, raw.CODECS[codec], stamp=stamp)
    found, passed = embedded.read(sent)
    (record,) = found
    assert (record.key, record.value, record.timestamp) == (b"k", b"v", stamp + 7) and not passed
    assert record.headers == [("name", b"\xff")]


def test_compacted_offsets_and_control_batches_are_no_damage(
    embedded: Reader,
) -> None:
    consumer, passed, found = embedded.consumer, [], []  # type: ignore[var-annotated]
    raw.put(
        embedded.kafka, TOPIC,
        raw.batch(raw.record(3, b"x") + raw.record(7, b"y"), 2, last=9),
        raw.batch(raw.record(0, b"z"), 1, last=HUGE),
        *(
            raw.batch(payload, 1, raw.CONTROL | 0x10)
            for payload in (raw.record(0, b"\0\0\0\1", b"\0\0\0\1"), b"\xff" * 40, b"")
        ),
        BEHIND,
    )  # fmt: skip
    until(lambda: found.extend(fetch(consumer, 100, passed.append)) or len(found) == 4)
    assert [r.value for r in found] == [b"x", b"y", b"z", b"behind"] and not passed


@pytest.mark.parametrize("stamp", [-(2**62), -1, 0, 2**31, 10**15, 2**62])
def test_timestamps_of_any_unit_are_accepted(mock: Reader, stamp: int) -> None:
    found, passed = mock.read(raw.sound([b"x"], stamp=stamp))
    assert datetime.fromtimestamp(found[0].timestamp / 1e3) and not passed


def test_records_damaged_on_the_broker_s_disk_are_skipped() -> None:
    corrupt = 2
    with running() as cluster:
        raw.put(cluster.kafka, TOPIC, *[raw.sound([b"%d" % n]) for n in range(4)])
        consumer = open_consumer(cluster.kafka, "test", max_poll_records=1)
        consumer.assign([PLACE])
        found: list[Any] = []
        passed: list[Unreadable] = []
        until(lambda: found.extend(fetch(consumer, 100)) or found, "the first")
        consumer.seek(PLACE, 2)
        cluster.answer(FETCH, corrupt)
        until(lambda: found.extend(fetch(consumer, 100, passed.append)) or found[-1].value == b"3")
        close(consumer)
    assert all(each.upto == each.offset + 1 for each in passed)
