"""Codec of record batches that survives malformed input: no batch stops its reader.

kafka-python (3.0.12) raises its decompressors' errors (for a broken gzip an OSError, as for an
unreachable broker) without naming the batch, returns nothing any more after one, and allocates as
much memory as a batch declares. Layout: ``DefaultRecordBatch`` of Apache Kafka.
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
from kafka.record.util import decode_varint

MAX_BYTES: Final = 16 << 20
"""Most bytes of a decompressed batch: several times what clients gather, but no bomb."""
MAX_VARINTS: Final = 2_000
"""Most numbers of a record, two for each header; valid ones have five headers at most."""
LATEST_MS: Final = 2**36 * 1_000
"""Latest timestamp, in the year 4147; the earliest is 0. Others are clamped: clients write
anything, such as microseconds, and dates are bounded."""
_OVERHEAD: Final = 12  # offset and length
_HEADER: Final = DefaultRecordBatch.HEADER_STRUCT
_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER: Final = 16


class Unreadable(Exception):
    """A batch that cannot be read, for the reason in ``__cause__``: records of partition ``place``
    from ``offset`` up to ``upto``, where the next batch begins."""

    def __init__(self, place: TopicPartition, offset: int, upto: int) -> None:
        super().__init__(f"partition {place.partition}, offset {offset}, {upto - offset} records")
        self.place, self.offset, self.upto = place, offset, upto


class SoundFetcher(Fetcher):  # type: ignore[misc]
    """A fetcher that raises :class:`Unreadable` once for each such batch, and can continue after
    it. Records before the first unreadable one are returned.
    """

    def _parse_fetched_data(self, completed_fetch: Any) -> Any:
        place, data = completed_fetch.topic_partition, completed_fetch.partition_data
        if data.error_code == NoError.errno and data.records:
            data.records = _framed(bytes(data.records))
        try:
            parsed = super()._parse_fetched_data(completed_fetch)
        except CorruptRecordError as error:  # the data on the broker's disk is damaged
            offset, state = completed_fetch.fetched_offset, self._subscriptions.assignment[place]
            if state.position.offset != offset:
                return None  # fetched before the reader moved to another offset
            if state.highwater is None or offset >= state.highwater:
                raise
            raise Unreadable(place, offset, offset + 1) from error
        if parsed is not None:
            parsed.end = data.high_watermark
        return parsed

    class PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
        """Records of one fetch; ``end`` is the end offset of the partition, or -1."""

        end = -1

        def take(self, n: int | None = None) -> list[Any]:
            """At most ``n`` records.

            Raises:
                Unreadable: the next batch cannot be read.
            """
            try:
                return super().take(n)  # type: ignore[no-any-return]
            except Unreadable:
                self.drain()  # else it would return nothing any more
                raise

        def _unpack_records(self, tp: TopicPartition, records: Any, *_: object) -> Iterator[Any]:
            data, at = records._buffer, 0
            while len(data) - at >= _OVERHEAD:
                (length,) = struct.unpack_from(">i", data, at + 8)
                after = at + _OVERHEAD + length
                if after > len(data):
                    break  # the next fetch has all of it
                try:
                    yield from self._records_of(tp, data[at:after])
                except Exception as error:
                    offset = max(self.next_fetch_offset, self.fetch_offset)
                    raise Unreadable(tp, offset, self._next(data, at, after, offset)) from error
                at = after
            self.drain()

        def _records_of(self, tp: TopicPartition, data: bytes) -> Iterator[Any]:
            batch = _Batch(data)
            if batch.magic != 2:
                raise CorruptRecordError(f"a batch of format {batch.magic}")
            if not batch.validate_crc():
                raise CorruptRecordError("its checksum is wrong")
            self.leader_epoch, last, before = batch.leader_epoch, batch.last_offset, -1
            if last < batch.base_offset:
                raise CorruptRecordError(f"its last offset delta is {batch.last_offset_delta}")
            for record in () if batch.is_control_batch else batch:
                if not max(before, batch.base_offset - 1) < record.offset <= last:
                    raise CorruptRecordError(f"offset {record.offset} behind {before}, of {last}")
                key, value, before = record.key, record.value, record.offset
                stamp = min(max(0, record.timestamp), LATEST_MS)
                self.records_read += 1
                self.bytes_read += record.size_in_bytes
                self.next_fetch_offset = record.offset + 1
                yield ConsumerRecord(
                    tp.topic, tp.partition, batch.leader_epoch, record.offset, stamp,
                    record.timestamp_type, key, value, record.headers, None,
                    -1 if key is None else len(key), -1 if value is None else len(value), -1,
                )  # fmt: skip
            # compaction may have removed the last records
            self.next_fetch_offset = max(last + 1, self.fetch_offset)

        def _next(self, data: bytes, at: int, after: int, offset: int) -> int:
            """Offset of the batch after the one at ``at``, by the headers of both, which may be
            damaged too. It is ``offset`` only where some records were read."""
            candidates, least = [], max(offset, self.fetch_offset + 1)
            if len(data) - at >= _HEADER.size:
                header = _HEADER.unpack_from(data, at)
                candidates.append(header[0] + header[6] + 1)
            if after > at and len(data) - after >= _OVERHEAD:
                candidates += struct.unpack_from(">q", data, after)
            return min((n for n in candidates if least <= n <= self.end), default=offset + 1)


def _framed(data: bytes) -> bytes:
    """The ``data`` of a fetch, with a length of its first batch that the client accepts: where that
    is damaged, all of it is one batch."""
    length = int.from_bytes(data[8:_OVERHEAD], "big", signed=True)
    if len(data) >= _HEADER.size and 0 < length <= len(data) - _OVERHEAD:
        return data
    data = data.ljust(_HEADER.size, b"\0")
    return data[:8] + struct.pack(">i", len(data) - _OVERHEAD) + data[_OVERHEAD:]


class _Batch(DefaultRecordBatch):  # type: ignore[misc]
    """A batch that neither unpacks a bomb nor reads headers without end."""

    _buffer: Any
    _pos: int
    _decompressed: bool

    def _maybe_uncompress(self) -> None:
        if not self._decompressed:
            self._buffer = bytearray(
                unpacked(self.compression_type, bytes(self._buffer[self._pos :]))
            )
            self._pos, self._decompressed = 0, True

    def _read_msg(self) -> Any:
        left = MAX_VARINTS

        def limited(data: bytes, at: int) -> tuple[int, int]:
            nonlocal left
            left -= 1
            if left < 0:
                raise CorruptRecordError("a record with too many headers")
            return decode_varint(data, at)  # type: ignore[no-any-return]

        return super()._read_msg(limited)


def unpacked(codec: int, data: bytes) -> bytes:
    """``data``, decompressed.

    Raises:
        Exception: it is damaged, holds more than ``MAX_BYTES``, or ``codec`` is unknown.
    """
    limit = MAX_BYTES + 1
    if codec == DefaultRecordBatch.CODEC_NONE:
        return data
    if codec == DefaultRecordBatch.CODEC_GZIP:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            content = file.read(limit)
    elif codec == DefaultRecordBatch.CODEC_SNAPPY:
        content = b"".join(_snappy_blocks(data))
    elif codec == DefaultRecordBatch.CODEC_LZ4:
        content = lz4.frame.LZ4FrameDecompressor().decompress(data, limit)
    elif codec == DefaultRecordBatch.CODEC_ZSTD:
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
            content = reader.read(limit)
    else:
        raise UnsupportedCodecError(f"compression {codec}")
    if len(content) >= limit:
        raise CorruptRecordError(f"more than {MAX_BYTES} bytes decompressed")
    return content


def _snappy_blocks(data: bytes) -> Iterator[bytes]:
    """The decompressed blocks of Java's framing, or the single block without framing."""
    left, at = MAX_BYTES, _XERIAL_HEADER
    framed = data.startswith(_XERIAL)
    while at < len(data) if framed else at == _XERIAL_HEADER:
        block = data
        if framed:
            (size,) = struct.unpack_from(">i", data, at)
            block = data[at + 4 : at + 4 + size] if size > 0 else b""
            at += 4
        declared = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(_length_varint(block)))
        left -= declared
        if left < 0:
            raise CorruptRecordError(f"more than {MAX_BYTES} bytes decompressed")
        yield snappy.uncompress(block)
        at += len(block)


def _length_varint(block: bytes) -> bytes:
    """The varint at the start of a snappy block, its decompressed length."""
    for i, byte in enumerate(block[:5]):
        if byte < 0x80:
            return block[: i + 1]
    raise CorruptRecordError("a snappy block without its length")
