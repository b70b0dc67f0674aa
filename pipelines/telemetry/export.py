"""Exports events into a folder as Parquet files, and resumes where it stopped.

Each file is written whole; then a note names it and the offsets it covers. Files that the note does
not name were interrupted and are written again. So each record is exported once. An event that a
worker sent twice has the same ``life`` and ``number``.
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
from learner.ingest.source import Fingerprint, fingerprint_of
from learner.state_dir import LOCK, lock
from pipelines.reports import Step, atomic_write
from pipelines.stack.processes import signals_deferred
from pipelines.telemetry.reading import reading, records, spans

FORMAT: Final = "hvd.export.v1"
NOTE: Final = "export.json"
ROWS_A_FILE: Final = 100_000  # about 50 MB in memory, and a tenth of that on disk
COUNTED: Final = ("records", "refused", "unreadable", "removed")
"""Records read, of these invalid ones, records that cannot be decompressed, and records that
expired since the last export."""

Piece = tuple[int, EventBatch]  # a record's partition and its events


@dataclass
class Export:
    """The content of a folder, and the next offset to read by partition."""

    rows: int = 0
    files: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of ``COUNTED``
    offsets: dict[int, int] = field(default_factory=dict)
    marks: dict[int, Fingerprint] = field(
        default_factory=dict
    )  # the last record read, by partition


def export(kafka: KafkaSettings, folder: Path, step: Step) -> Export:
    """Write new records into ``folder``, up to the topic's present end.

    On an interrupt it writes what it has read, and passes the interrupt on.

    Args:
        step: called with records done and to do.

    Raises:
        TraceError: the folder holds something else, is full, or another export writes to it.
        BrokerError: the broker goes away, or its topic was recreated.
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
    state, pieces = _resumed(folder), list[Piece]()
    reached = dict(state.offsets)

    def pass_over(count: int) -> None:
        state.counts["unreadable"] += count

    with reading(kafka, "export") as consumer:
        wanted = _wanted(consumer, state)
        reached |= {partition: span.start for partition, span in wanted.items()}
        whole, done = sum(map(len, wanted.values())), 0
        _write(folder, state, [], reached)  # marks the folder as ours before it holds a file
        try:
            for fetched in records(consumer, DRAFTS, wanted, pass_over):
                with signals_deferred():  # no interrupt between a record and its offset
                    for record in fetched:
                        state.counts["records"] += 1
                        try:
                            pieces.append((record.partition, decode_batch(record.value or b"")))
                        except EventRefused:
                            state.counts["refused"] += 1
                        reached[record.partition] = record.offset + 1
                        state.marks[record.partition] = fingerprint_of(record)
                    if sum(len(batch) for _, batch in pieces) >= ROWS_A_FILE:
                        _write(folder, state, pieces, reached)
                done += len(fetched)
                step("records", done, whole)
            reached |= {partition: span.stop for partition, span in wanted.items()}
        finally:
            with signals_deferred():
                _write(folder, state, pieces, reached)
    return state


def _check(folder: Path) -> None:
    names = {each.name for each in folder.iterdir()} if folder.exists() else set()
    if NOTE not in names and names - {f"{NOTE}.part", LOCK}:
        raise TraceError(f"{folder} holds files and no export: name a folder of its own.")


def _resumed(folder: Path) -> Export:
    """The export in ``folder``, without interrupted files; an empty one if there is none."""
    path = folder / NOTE
    if not path.exists():
        return Export()
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        if note["format"] != FORMAT:
            raise ValueError(f"format {note['format']!r}")
        counts = Counter({name: int(note["counts"].get(name, 0)) for name in COUNTED})
        offsets = {int(partition): int(at) for partition, at in note["offsets"].items()}
        marks = {int(p): (int(at), int(ms), int(crc)) for p, (at, ms, crc) in note.get("marks", ())}
        state = Export(int(note["rows"]), list(note["files"]), counts, offsets, marks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no note of an export: {error}") from error
    for stray in folder.glob("drafts-*"):
        if stray.name not in state.files:
            stray.unlink()
    return state


def _wanted(consumer: Any, state: Export) -> dict[int, range]:
    """Offsets to read from where the last export stopped. Counts expired records."""
    available = spans(consumer, DRAFTS)
    recreated = [p for p, at in state.offsets.items() if at > available.get(p, range(0)).stop]
    # a recreated partition that has grown past the offset holds another record there
    places = {p: range(at, at + 1) for p, (at, _, _) in state.marks.items() if not recreated}
    last = {p: place for p, place in places.items() if place.start in available.get(p, ())}
    for fetched in records(consumer, DRAFTS, last):
        recreated += [r.partition for r in fetched if fingerprint_of(r) != state.marks[r.partition]]
    if recreated:
        raise BrokerError(
            f"{DRAFTS.name} was recreated since partition {recreated[0]} was read. Export into "
            "another folder."
        )
    due = {p: state.offsets.get(p, span.start) for p, span in available.items()}
    state.counts["removed"] += sum(max(available[p].start - at, 0) for p, at in due.items())
    return {p: range(max(span.start, due[p]), span.stop) for p, span in available.items()}


def _table(pieces: Sequence[Piece]) -> Any:
    """The events as Arrow columns: features as floats, null without a draft."""
    import pyarrow as pa

    tables = []
    for partition, batch in pieces:
        origin = asdict(batch.origin) | {"partition": partition, "sequence": batch.sequence}
        columns: dict[str, Any] = {key: [value] * len(batch) for key, value in origin.items()}
        for each in FIELDS:
            column: Any = {**batch.names, **batch.numbers}[each.name]
            columns[each.name] = pa.array(column, mask=column < 0) if each.nullable else column
        columns |= {f"feature_{name}": batch.features[:, at] for at, name in enumerate(FEATURES)}
        arrays = {name: pa.array(each, from_pandas=True) for name, each in columns.items()}
        tables.append(pa.table(arrays))
    return pa.concat_tables(tables, promote_options="permissive")


def _write(folder: Path, state: Export, pieces: list[Piece], reached: Mapping[int, int]) -> None:
    """Write ``pieces`` into a file, and then the note. Empties ``pieces`` and advances
    ``state``."""
    import pyarrow.parquet as pq

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pieces:
            name = f"drafts-{len(state.files):05d}.parquet"
            table = _table(pieces)
            atomic_write(
                folder / name, lambda part: pq.write_table(table, part, compression="zstd")
            )
            state.files.append(name)
            state.rows += len(table)
        pieces.clear()
        state.offsets = dict(reached)
        counts = {name: state.counts[name] for name in COUNTED}
        note = {"format": FORMAT, "topic": DRAFTS.name, **vars(state), "counts": counts}
        note["marks"] = [*state.marks.items()]
        atomic_write(folder / NOTE, lambda part: part.write_text(json.dumps(note, indent=1)))
    except OSError as error:
        raise TraceError(
            f"{folder} cannot be written ({error}): its files are complete. Make room and run this "
            "again; it resumes there."
        ) from error
