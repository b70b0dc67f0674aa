"""An export: events as Parquet files in a folder, with what it takes to go on where it stopped.

A file is written whole, then the note beside it names it and the offsets it reaches to; what is in
the folder and not in the note was cut short, and is written again. So each record is there once,
whenever it is stopped; an event that a worker sent twice is told by its ``life`` and ``number``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import BrokerError, EventRefused, TraceError
from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.features import FEATURES
from decoder.contracts.fields import FIELDS
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from learner.home import LOCK, lock
from learner.ingest.source import Mark, mark_of
from pipelines.reports import Step, atomic_write
from pipelines.stack.processes import signals_deferred
from pipelines.telemetry.reading import reading, records, spans

FORMAT: Final = "hvd.export.v1"
NOTE: Final = "export.json"
ROWS_A_FILE: Final = 100_000
"""About 50 MB while they are signals_deferred, and a tenth of that on the disk."""
COUNTED: Final = ("records", "refused", "unreadable", "removed")
"""Records that were read, of these those that keep no contract, what cannot be unpacked, and what
age removed since the export before."""

Piece = tuple[int, EventBatch]
"""A record's partition and its events."""


@dataclass
class Export:
    """What lies in a folder, and how far it has read. Offsets by partition, next to read."""

    rows: int = 0
    files: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of ``COUNTED``
    offsets: dict[int, int] = field(default_factory=dict)
    marks: dict[int, Mark] = field(default_factory=dict)  # the last record read, by partition


def export(kafka: KafkaSettings, folder: Path, step: Step) -> Export:
    """Write into ``folder`` what has come since the last time, up to what lies there now.

    Interrupted, it writes what it has in hand before it passes the interrupt on.

    Args:
        step: told records done and to do.

    Raises:
        TraceError: the folder holds something else, is full, or another export writes to it.
        BrokerError: the broker goes away, or its topic was made anew since.
    """
    _check(folder)
    try:
        file = lock(folder)
    except OSError as error:
        why = "another export writes to it" if isinstance(error, BlockingIOError) else error
        raise TraceError(f"{folder} cannot be written ({why}): name another.") from error
    with file:
        return _exported(kafka, folder, step)


def _exported(kafka: KafkaSettings, folder: Path, step: Step) -> Export:
    found, pieces = _resumed(folder), list[Piece]()
    reached = dict(found.offsets)

    def pass_over(count: int) -> None:
        found.counts["unreadable"] += count

    with reading(kafka, "export") as consumer:
        wanted = _wanted(consumer, found)
        reached |= {partition: span.start for partition, span in wanted.items()}
        whole, done = sum(map(len, wanted.values())), 0
        _write(folder, found, [], reached)  # the folder is ours before there is a file in it
        try:
            for fetched in records(consumer, DRAFTS, wanted, pass_over):
                with signals_deferred():  # no interrupt between what is in hand and its offset
                    for record in fetched:
                        found.counts["records"] += 1
                        try:
                            pieces.append((record.partition, decode_batch(record.value or b"")))
                        except EventRefused:
                            found.counts["refused"] += 1
                        reached[record.partition] = record.offset + 1
                        found.marks[record.partition] = mark_of(record)
                    if sum(len(batch) for _, batch in pieces) >= ROWS_A_FILE:
                        _write(folder, found, pieces, reached)
                done += len(fetched)
                step("records", done, whole)
            reached |= {partition: span.stop for partition, span in wanted.items()}
        finally:
            with signals_deferred():
                _write(folder, found, pieces, reached)
    return found


def _check(folder: Path) -> None:
    names = {each.name for each in folder.iterdir()} if folder.exists() else set()
    if NOTE not in names and names - {f"{NOTE}.part", LOCK}:
        raise TraceError(f"{folder} holds files and no export: name a folder of its own.")


def _resumed(folder: Path) -> Export:
    """What lies in ``folder``, rid of files that were cut short; an empty one where none does."""
    path = folder / NOTE
    if not path.exists():
        return Export()
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']!r}")
        counts = Counter({name: int(told["counts"].get(name, 0)) for name in COUNTED})
        offsets = {int(partition): int(at) for partition, at in told["offsets"].items()}
        marks = {int(p): (int(at), int(ms), int(crc)) for p, (at, ms, crc) in told.get("marks", ())}
        found = Export(int(told["rows"]), list(told["files"]), counts, offsets, marks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no note of an export: {error}") from error
    for stray in folder.glob("drafts-*"):
        if stray.name not in found.files:
            stray.unlink()
    return found


def _wanted(consumer: Any, found: Export) -> dict[int, range]:
    """Offsets to read: from where it stopped. Counts what lay there and is gone."""
    lying = spans(consumer, DRAFTS)
    anew = [p for p, at in found.offsets.items() if at > lying.get(p, range(0)).stop]
    # one that has grown past what was read holds another record there
    places = {p: range(at, at + 1) for p, (at, _, _) in found.marks.items() if not anew}
    there = {p: place for p, place in places.items() if place.start in lying.get(p, ())}
    for fetched in records(consumer, DRAFTS, there):
        anew += [r.partition for r in fetched if mark_of(r) != found.marks[r.partition]]
    if anew:
        raise BrokerError(
            f"{DRAFTS.name} was made anew since partition {anew[0]} was read. Export into another "
            "folder."
        )
    due = {p: found.offsets.get(p, span.start) for p, span in lying.items()}
    found.counts["removed"] += sum(max(lying[p].start - at, 0) for p, at in due.items())
    return {p: range(max(span.start, due[p]), span.stop) for p, span in lying.items()}


def _table(pieces: Sequence[Piece]) -> Any:
    """The events as columns of Arrow: features as floats, null without a draft."""
    import pyarrow as pa

    tables = []
    for partition, batch in pieces:
        whence = asdict(batch.origin) | {"partition": partition, "sequence": batch.sequence}
        columns: dict[str, Any] = {key: [value] * len(batch) for key, value in whence.items()}
        for each in FIELDS:
            column: Any = {**batch.names, **batch.numbers}[each.name]
            columns[each.name] = pa.array(column, mask=column < 0) if each.nullable else column
        columns |= {f"feature_{name}": batch.features[:, at] for at, name in enumerate(FEATURES)}
        arrays = {name: pa.array(each, from_pandas=True) for name, each in columns.items()}
        tables.append(pa.table(arrays))
    return pa.concat_tables(tables, promote_options="permissive")


def _write(folder: Path, found: Export, pieces: list[Piece], reached: Mapping[int, int]) -> None:
    """Write ``pieces`` into a file, and then the note. Empties ``pieces``; moves ``found`` on."""
    import pyarrow.parquet as pq

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pieces:
            name = f"drafts-{len(found.files):05d}.parquet"
            table = _table(pieces)
            atomic_write(
                folder / name, lambda part: pq.write_table(table, part, compression="zstd")
            )
            found.files.append(name)
            found.rows += len(table)
        pieces.clear()
        found.offsets = dict(reached)
        counts = {name: found.counts[name] for name in COUNTED}
        told = {"format": FORMAT, "topic": DRAFTS.name, **vars(found), "counts": counts}
        told["marks"] = [*found.marks.items()]
        atomic_write(folder / NOTE, lambda part: part.write_text(json.dumps(told, indent=1)))
    except OSError as error:
        raise TraceError(
            f"{folder} cannot be written ({error}): what lies there is whole. Make room and run "
            "this again, it goes on from there."
        ) from error
