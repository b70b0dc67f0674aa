"""An export: events as Parquet files in a folder, with what it takes to go on where it stopped.

A file is written whole, then the note beside it names it and the offsets it reaches to; what is in
the folder and not in the note was cut short, and is written again. So each event is there once,
whenever it is stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kafka import TopicPartition

from decoder.contracts.errors import BrokerError, TraceError
from decoder.contracts.events import COLUMNS
from decoder.contracts.features import FEATURES
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from learner.sequences import runs_of
from learner.source import Mark, mark_of
from pipelines.progress import Step
from pipelines.reports import atomic_write
from pipelines.stack.interrupts import held
from pipelines.telemetry.reading import moment, reading, records, spans
from pipelines.telemetry.rows import Counts, Intake, Rows, Seen

FORMAT: Final = "hvd.export.v1"
NOTE: Final = "export.json"
ROWS_A_FILE: Final = 100_000
"""About 50 MB while they are held, and a tenth of that on the disk."""
TOLD: Final = ("format", "topic", "since", "until", "began", "ended", "rows", "files")

Period = tuple[str, str]
"""Since and until, as :func:`pipelines.telemetry.reading.moment` reads them; "" for no bound. What
was "an hour ago" at first stays that moment when the export goes on."""


@dataclass
class Export:
    """What lies in a folder, and how far it has read. Offsets by partition, next to read."""

    note: dict[str, Any]
    """Of ``TOLD``: ``began`` and ``ended`` are the period in seconds since the epoch, or None."""
    intake: Intake = field(default_factory=Intake)
    offsets: dict[int, int] = field(default_factory=dict)
    marks: dict[int, Mark] = field(default_factory=dict)  # the last record read, by partition


def export(kafka: KafkaSettings, folder: Path, step: Step, period: Period = ("", "")) -> Export:
    """Write into ``folder`` what has come since the last time, up to what lies there now.

    Interrupted, it writes what it has in hand before it passes the interrupt on.

    Args:
        step: told records done and to do.
        period: of the choices whose events are wanted.

    Raises:
        TraceError: the folder holds an export of another period, or something else, or is full.
        SettingsError: the period is none.
        BrokerError: the broker goes away, or its topic was made anew since.
    """
    found = _resumed(folder, period)
    pieces: list[Rows] = []
    reached = dict(found.offsets)
    with reading(kafka, "export") as consumer:
        wanted = _wanted(consumer, found)
        whole, done = sum(map(len, wanted.values())), 0
        _write(folder, found, [], reached)  # the folder is ours before there is a file in it
        try:
            for fetched in records(consumer, DRAFTS, wanted, found.intake.pass_over):
                with held():  # no interrupt between what is seen, what is in hand, and its offset
                    for record in fetched:
                        rows = found.intake.take(record.partition, record.value)
                        if rows is not None:
                            pieces.append(_inside(rows, found.note))
                        reached[record.partition] = record.offset + 1
                        found.marks[record.partition] = mark_of(record)
                    if sum(map(len, pieces)) >= ROWS_A_FILE:
                        _write(folder, found, pieces, reached)
                done += len(fetched)
                step("records", done, whole)
            reached |= {partition: span.stop for partition, span in wanted.items()}
        finally:
            with held():
                _write(folder, found, pieces, reached)
    return found


def _resumed(folder: Path, period: Period) -> Export:
    """What lies in ``folder``, rid of files that were cut short; an empty one where none does."""
    path = folder / NOTE
    if not path.exists():
        if folder.exists() and {each.name for each in folder.iterdir()} - {f"{NOTE}.part"}:
            raise TraceError(f"{folder} holds files and no export: name a folder of its own.")
        bounds = (moment(text, time.time()) if text else None for text in period)
        files: list[str] = []
        told = zip(TOLD, (FORMAT, DRAFTS.name, *period, *bounds, 0, files), strict=True)
        return Export(dict(told))
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']!r}")
        kept = told["kept"]
        intake = Intake(Counts(**told["counts"]), Seen(kept["seen"]), runs_of(kept["sequences"]))
        offsets = {int(partition): int(at) for partition, at in told["offsets"].items()}
        marks = {int(p): (int(at), int(ms), int(crc)) for p, (at, ms, crc) in told.get("marks", ())}
        found = Export({key: told[key] for key in TOLD}, intake, offsets, marks)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise TraceError(f"{path} is no note of an export: {error}") from error
    if (told["since"], told["until"]) != period:
        raise TraceError(
            f"{folder} is an export of another period: ask for the same --since and --until as "
            "then, or name another folder."
        )
    for stray in folder.glob("drafts-*"):
        if stray.name not in told["files"]:
            stray.unlink()
    return found


def _wanted(consumer: Any, found: Export) -> dict[int, range]:
    """Offsets to read: from where it stopped, or from the first that may matter."""
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
    first = {p: span.start for p, span in lying.items()}
    if (began := found.note["began"]) is not None:
        # An event is sent after the choice that it tells of: what was sent before is of before.
        asked = {TopicPartition(DRAFTS.name, p): int(began * 1000) for p in lying}
        for place, at in consumer.offsets_for_times(asked).items():
            first[place.partition] = at.offset if at else lying[place.partition].stop
    return {
        p: range(max(span.start, found.offsets.get(p, first[p])), span.stop)
        for p, span in lying.items()
    }


def _inside(rows: Rows, note: Mapping[str, Any]) -> Rows:
    """Those of ``rows`` that are of the period."""
    times, wanted = rows.batch.numbers["time"], rows.wanted
    if note["began"] is not None:
        wanted = wanted & (times >= note["began"])
    if note["ended"] is not None:
        wanted = wanted & (times < note["ended"])
    return replace(rows, wanted=wanted)


def _table(pieces: Iterable[Rows]) -> Any:
    """The wanted rows as columns of Arrow: features as floats, null without a draft."""
    import pyarrow as pa

    tables = []
    for piece in pieces:
        batch = piece.batch
        whence = asdict(batch.origin) | {"partition": piece.partition, "sequence": batch.sequence}
        columns: dict[str, Any] = {key: [value] * len(batch) for key, value in whence.items()}
        columns |= {name: ({**batch.names, **batch.numbers})[name] for name in COLUMNS}
        columns |= {f"feature_{name}": batch.features[:, at] for at, name in enumerate(FEATURES)}
        made = pa.table({name: pa.array(each, from_pandas=True) for name, each in columns.items()})
        tables.append(made.filter(pa.array(piece.wanted)))
    table = pa.concat_tables(tables, promote_options="permissive")
    at = table.column_names.index("model_accepted")
    return table.set_column(at, "model_accepted", table["model_accepted"].cast(pa.int64()))


def _write(folder: Path, found: Export, pieces: list[Rows], reached: Mapping[int, int]) -> None:
    """Write ``pieces`` into a file, and then the note. Empties ``pieces``; moves ``found`` on."""
    note, intake = found.note, found.intake
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = sum(map(len, pieces))
        if rows:
            name = f"drafts-{len(note['files']):05d}.parquet"
            write_table(folder / name, _table(filter(len, pieces)))
            note["files"].append(name)
            note["rows"] += rows
        pieces.clear()
        found.offsets = dict(reached)
        told = note | {
            "counts": asdict(intake.counts),
            "offsets": found.offsets,
            "marks": [*found.marks.items()],
            "kept": {"seen": intake.seen.runs(), "sequences": intake.sequences.known()},
        }
        atomic_write(folder / NOTE, lambda part: part.write_text(json.dumps(told, indent=1)))
    except OSError as error:
        raise TraceError(
            f"{folder} cannot be written ({error}): what lies there is whole. Make room and run "
            "this again, it goes on from there."
        ) from error


def write_table(path: Path, table: Any) -> None:
    """Put an Arrow ``table`` into the Parquet file at ``path``, whole or, with OSError, not."""
    import pyarrow.parquet as pq

    atomic_write(path, lambda part: pq.write_table(table, part, compression="zstd"))
