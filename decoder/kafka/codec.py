"""Codec of record batches: none of them, whatever its bytes, stops its reader.

kafka-python (3.0.12) raises whatever its decompressors do (of a broken gzip an OSError, as of a
broker that is away), forgets which batch it was, gives nothing for ever where it failed once, and
takes as much memory as a batch asks for. Layout: ``DefaultRecordBatch`` of Apache Kafka.
"""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Iterator
from typing import Any, Final

import lz4.frame
import snappy
import zstandard
from kafka import TopicPartition
from kafka.consumer.fetcher import ConsumerRecord, Fetcher
from kafka.errors import CorruptRecordError, NoError, UnsupportedCodecError
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.util import calc_crc32c, decode_varint

MOST_BYTES: Final = 16 << 20
"""Of a batch without its compression: some times what clients gather, and no bomb."""
MOST_HEADERS: Final = 1_000
"""Of a record, which has five at most."""
LATEST_MS: Final = 2**36 * 1_000
"""The latest stamp that is handed on, of the year 4147; the earliest is 0. Clients write anything,
microseconds too, and a date has an end."""
_OVERHEAD: Final = 12  # offset and length
_HEADER: Final = DefaultRecordBatch.HEADER_STRUCT
_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER: Final = 16


class Unreadable(Exception):
    """A batch that cannot be unpacked, as ``__cause__`` has it: records of ``place`` from
    ``offset`` up to ``upto``, where the next batch begins."""

    def __init__(self, place: TopicPartition, offset: int, upto: int) -> None:
        super().__init__(f"partition {place.partition}, offset {offset}, {upto - offset} records")
        self.place, self.offset, self.upto = place, offset, upto


class SoundFetcher(Fetcher):  # type: ignore[misc]
    """A fetcher that raises :class:`Unreadable`, once a batch, and goes on behind it when asked.

    A batch is handed on up to the first record that cannot be read.
    """

    def _parse_fetched_data(self, completed_fetch: Any) -> Any:
        place, data = completed_fetch.topic_partition, completed_fetch.partition_data
        if data.error_code == NoError.errno and data.records:
            data.records = _framed(bytes(data.records))
        try:
            parsed = super()._parse_fetched_data(completed_fetch)
        except CorruptRecordError as error:  # what lies on the broker's disk is damaged
            offset, state = completed_fetch.fetched_offset, self._subscriptions.assignment[place]
            if state.position.offset != offset:
                return None  # it was asked before the reader went elsewhere
            if state.highwater is None or offset >= state.highwater:
                raise
            raise Unreadable(place, offset, offset + 1) from error
        if parsed is not None:
            parsed.end = data.high_watermark
        return parsed

    class PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
        """Records of one fetch; ``end`` is the offset behind the partition's last, or -1."""

        end = -1

        def take(self, n: int | None = None) -> list[Any]:
            """At most ``n`` records.

            Raises:
                Unreadable: the next batch cannot be unpacked.
            """
            try:
                return super().take(n)  # type: ignore[no-any-return]
            except Unreadable:
                self.drain()  # asked again, it would give nothing for ever
                raise

        def _unpack_records(self, tp: TopicPartition, records: Any, *_: object) -> Iterator[Any]:
            data, at = records._buffer, 0
            while len(data) - at >= _OVERHEAD:
                (length,) = struct.unpack_from(">i", data, at + 8)
                after = at + _OVERHEAD + length
                if after > len(data):
                    break  # the rest comes with the next fetch
                try:
                    yield from self._records_of(tp, data[at:after])
                except Exception as error:
                    offset = max(self.next_fetch_offset, self.fetch_offset)
                    raise Unreadable(tp, offset, self._behind(data, at, after, offset)) from error
                at = after
            self.drain()

        def _records_of(self, tp: TopicPartition, batch: bytes) -> Iterator[Any]:
            (
                base, _, epoch, magic, crc, attributes, last, first_ms, last_ms, _, _, _, count,
            ) = _HEADER.unpack_from(batch)  # fmt: skip
            if magic != 2:
                raise CorruptRecordError(f"a batch of format {magic}")
            if calc_crc32c(memoryview(batch)[DefaultRecordBatch.ATTRIBUTES_OFFSET :]) != crc:
                raise CorruptRecordError("its sum is wrong")
            if last < 0:
                raise CorruptRecordError(f"its last offset is {last} behind its first")
            self.leader_epoch = epoch
            if not attributes & DefaultRecordBatch.CONTROL_MASK:
                data = unpacked(attributes & DefaultRecordBatch.CODEC_MASK, batch[_HEADER.size :])
                stamped = attributes & DefaultRecordBatch.TIMESTAMP_TYPE_MASK
                kind, before = int(bool(stamped)), -1
                for late, delta, key, value, headers, size in _parsed(data, count):
                    if not before < delta <= last:
                        raise CorruptRecordError(f"offset {delta} behind {before}, of {last}")
                    before, offset = delta, base + delta
                    stamp = min(max(0, last_ms if stamped else first_ms + late), LATEST_MS)
                    self.records_read += 1
                    self.bytes_read += size
                    self.next_fetch_offset = offset + 1
                    yield ConsumerRecord(
                        tp.topic, tp.partition, epoch, offset, stamp, kind, key, value, headers,
                        None, -1 if key is None else len(key), -1 if value is None else len(value),
                        -1,
                    )  # fmt: skip
            # compaction may have removed the last records
            self.next_fetch_offset = max(base + last + 1, self.fetch_offset)

        def _behind(self, data: bytes, at: int, after: int, offset: int) -> int:
            """Where the batch behind the one at ``at`` begins, as its header, which may be what is
            damaged, and the next one say: at ``offset`` itself only where some of it was read."""
            said, least = [], max(offset, self.fetch_offset + 1)
            if len(data) - at >= _HEADER.size:
                header = _HEADER.unpack_from(data, at)
                said.append(header[0] + header[6] + 1)
            if after > at and len(data) - after >= _OVERHEAD:
                said += struct.unpack_from(">q", data, after)
            return min((each for each in said if least <= each <= self.end), default=offset + 1)


def _framed(data: bytes) -> bytes:
    """``data`` as a fetch brought it, with a length of its first batch that the client accepts:
    where that is damaged, the batch is taken to be all there is."""
    length = int.from_bytes(data[8:_OVERHEAD], "big", signed=True)
    if len(data) >= _HEADER.size and 0 < length <= len(data) - _OVERHEAD:
        return data
    data = data.ljust(_HEADER.size, b"\0")
    return data[:8] + struct.pack(">i", len(data) - _OVERHEAD) + data[_OVERHEAD:]


def unpacked(codec: int, data: bytes) -> bytes:
    """``data`` without its compression.

    Raises:
        Exception: it is damaged, holds more than ``MOST_BYTES``, or ``codec`` is none of Kafka's.
    """
    most = MOST_BYTES + 1
    if codec == DefaultRecordBatch.CODEC_NONE:
        return data
    if codec == DefaultRecordBatch.CODEC_GZIP:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(most)
    elif codec == DefaultRecordBatch.CODEC_SNAPPY:
        found = b"".join(_unsnapped(data))
    elif codec == DefaultRecordBatch.CODEC_LZ4:
        found = lz4.frame.LZ4FrameDecompressor().decompress(data, most)
    elif codec == DefaultRecordBatch.CODEC_ZSTD:
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
            found = reader.read(most)
    else:
        raise UnsupportedCodecError(f"compression {codec}")
    if len(found) >= most:
        raise CorruptRecordError(f"more than {MOST_BYTES} bytes without its compression")
    return found


def _unsnapped(data: bytes) -> Iterator[bytes]:
    """The blocks of Java's framing, or the one block that stands without any."""
    left, at = MOST_BYTES, _XERIAL_HEADER
    framed = data.startswith(_XERIAL)
    while at < len(data) if framed else at == _XERIAL_HEADER:
        block = data
        if framed:
            (size,) = struct.unpack_from(">i", data, at)
            block = data[at + 4 : at + 4 + size] if size > 0 else b""
            at += 4
        declared = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(_lead(block)))
        left -= declared
        if left < 0:
            raise CorruptRecordError(f"more than {MOST_BYTES} bytes without its compression")
        yield snappy.uncompress(block)
        at += len(block)


def _lead(block: bytes) -> bytes:
    """The bytes of the number that a block of snappy begins with: its length when uncompressed."""
    for place, byte in enumerate(block[:5]):
        if byte < 0x80:
            return block[: place + 1]
    raise CorruptRecordError("a block of snappy without its length")


def _parsed(data: bytes, count: int) -> Iterator[tuple[Any, ...]]:
    """The ``count`` records of a batch: time and offset beyond its first, key, value, headers and
    size in bytes.

    Raises:
        CorruptRecordError, IndexError, ValueError: they are not what their lengths say.
    """
    at = 0

    def number() -> int:
        nonlocal at
        found, at = decode_varint(data, at)
        return int(found)

    def piece() -> bytes | None:
        nonlocal at
        size = number()
        if size < 0:
            return None
        if at + size > len(data):
            raise CorruptRecordError(f"{size} bytes where {len(data) - at} are left")
        at += size
        return data[at - size : at]

    for _ in range(count):
        size = number()
        begins = at
        at += 1  # attributes, of which there are none
        late, delta, key, value, headers = number(), number(), piece(), piece(), number()
        if not 0 <= headers <= MOST_HEADERS:
            raise CorruptRecordError(f"{headers} headers")
        pairs = [((piece() or b"").decode(), piece()) for _ in range(headers)]
        if at - begins != size:
            raise CorruptRecordError(f"a record of {size} bytes that has {at - begins}")
        yield late, delta, key, value, pairs, size
    if at != len(data):
        raise CorruptRecordError(f"{len(data) - at} bytes behind {count} records")
