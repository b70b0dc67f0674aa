"""An export: events as Parquet files in a folder, with what it takes to go on where it stopped.

A file is written whole, then the note beside it names it and the offsets it reaches to; what is in
the folder and not in the note was cut short, and is written again. So each event is there once,
whenever it is stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.errors import BrokerError, TraceError
from decoder.contracts.events import COLUMNS
from decoder.contracts.features import FEATURES
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from pipelines.progress import Step
from pipelines.reports import atomic_write
from pipelines.stack.interrupts import held
from pipelines.telemetry.reading import moment, reading, records, since, spans
from pipelines.telemetry.rows import Counts, Intake, Rows, Seen

FORMAT: Final = "hvd.export.v1"
NOTE: Final = "export.json"
ROWS_A_FILE: Final = 100_000
"""About 50 MB while they are held, and a tenth of that on the disk."""

Period = tuple[str, str]
"""Since and until, as :func:`pipelines.telemetry.reading.moment` reads them; "" for no bound. What
was "an hour ago" at first stays that moment when the export goes on."""


@dataclass
class Export:
    """What lies in a folder, and how far it has read. Offsets by partition, next to read."""

    period: Period = ("", "")
    began: float | None = None  # seconds since the epoch; events of an earlier choice are left out
    ended: float | None = None  # and of this or a later one
    offsets: dict[int, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    intake: Intake = field(default_factory=Intake)
    written: int = 0  # rows

    @property
    def counts(self) -> Counts:
        """Of what was read."""
        return self.intake.counts


def export(
    kafka: KafkaSettings,
    folder: Path,
    step: Step,
    period: Period = ("", ""),
) -> Export:
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
    found = resumed(folder, period)
    pieces: list[Rows] = []
    reached = dict(found.offsets)
    with reading(kafka, "export") as consumer:
        wanted = _wanted(consumer, found)
        whole, done = sum(map(len, wanted.values())), 0
        try:
            for fetched in records(consumer, DRAFTS, wanted):
                with held():  # no interrupt between what is seen, what is in hand, and its offset
                    for record in fetched:
                        rows = found.intake.take(record.partition, record.value)
                        if rows is not None:
                            pieces.append(_inside(rows, found))
                        reached[record.partition] = record.offset + 1
                    if sum(map(len, pieces)) >= ROWS_A_FILE:
                        _write(folder, found, pieces, reached)
                done += len(fetched)
                step("records", done, whole)
            reached |= {partition: span.stop for partition, span in wanted.items()}
        finally:
            with held():
                _write(folder, found, pieces, reached)
    return found


def resumed(folder: Path, period: Period) -> Export:
    """What lies in ``folder``, rid of files that were cut short; an empty one where nothing does.

    Raises:
        TraceError: it cannot be read, or is of another period.
        SettingsError: the period is none.
    """
    path = folder / NOTE
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise TraceError(f"{folder} holds files and no export: name a folder of its own.")
        began, ended = (moment(text, time.time()) if text else None for text in period)
        return Export(period, began, ended)
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']!r}")
        kept = told["kept"]
        found = Export(
            (told["since"], told["until"]),
            told["began"],
            told["ended"],
            {int(partition): offset for partition, offset in told["offsets"].items()},
            told["files"],
            Intake(Counts(**told["counts"]), Seen(kept["seen"]), map(tuple, kept["sequences"])),
            told["rows"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no note of an export: {error}") from error
    if found.period != period:
        raise TraceError(
            f"{folder} is an export of another period: ask for the same --since and --until as "
            "then, or name another folder."
        )
    for stray in folder.glob("drafts-*"):
        if stray.name not in found.files:
            stray.unlink()
    return found


def _wanted(consumer: Any, found: Export) -> dict[int, range]:
    """Offsets to read: from where it stopped, or from the first that may matter."""
    lying = spans(consumer, DRAFTS)
    for partition, offset in found.offsets.items():
        if offset > lying.get(partition, range(0)).stop:
            raise BrokerError(
                f"{DRAFTS.name} was made anew since: partition {partition} ends before {offset}, "
                "which was read already. Export into another folder."
            )
    # An event is sent after the choice that it tells of: what was sent before is of before.
    first = since(consumer, DRAFTS, lying, found.began) if found.began is not None else lying
    return {
        p: range(max(span.start, found.offsets.get(p, first[p].start)), span.stop)
        for p, span in lying.items()
    }


def _inside(rows: Rows, found: Export) -> Rows:
    """Those of ``rows`` that are of the period."""
    times, wanted = rows.batch.numbers["time"], rows.wanted
    if found.began is not None:
        wanted = wanted & (times >= found.began)
    if found.ended is not None:
        wanted = wanted & (times < found.ended)
    return replace(rows, wanted=wanted)


def _table(pieces: Sequence[Rows]) -> Any:
    """The wanted rows as columns of Arrow: features as floats, null without a draft."""
    import pyarrow as pa

    batches = [piece.batch for piece in pieces]
    counts = [len(piece) for piece in pieces]

    def repeated(values: list[Any]) -> Any:
        return np.repeat(np.array(values, object), counts)

    def joined(columns: list[Any]) -> Any:
        wanted = zip(columns, pieces, strict=True)
        return np.concatenate([column[piece.wanted] for column, piece in wanted])

    columns: dict[str, Any] = {
        name: repeated([getattr(batch.origin, name) for batch in batches])
        for name in ("scope", "worker", "life", "target", "drafter")
    }
    columns["partition"] = repeated([piece.partition for piece in pieces])
    columns["sequence"] = repeated([batch.sequence for batch in batches])
    for name in COLUMNS:
        if name in batches[0].names:
            columns[name] = joined([np.array(batch.names[name], object) for batch in batches])
        else:
            columns[name] = joined([batch.numbers[name] for batch in batches])
    features = joined([batch.features for batch in batches])
    columns |= {f"feature_{name}": features[:, index] for index, name in enumerate(FEATURES)}
    table = {name: pa.array(column, from_pandas=True) for name, column in columns.items()}
    return pa.table({**table, "model_accepted": table["model_accepted"].cast(pa.int64())})


def _write(folder: Path, found: Export, pieces: list[Rows], reached: Mapping[int, int]) -> None:
    """Write ``pieces`` into a file, and then the note. Empties ``pieces``; moves ``found`` on.

    Raises:
        TraceError: the disk refuses; what lies there is whole.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = sum(map(len, pieces))
        if rows:
            name = f"drafts-{len(found.files):05d}.parquet"
            write_table(folder / name, _table([piece for piece in pieces if len(piece)]))
            found.files.append(name)
            found.written += rows
        pieces.clear()
        found.offsets = dict(reached)
        atomic_write(folder / NOTE, lambda part: part.write_text(_note(found), encoding="utf-8"))
    except OSError as error:
        raise TraceError(
            f"{folder} cannot be written ({error}): what lies there is whole. Make room and run "
            "this again, it goes on from there."
        ) from error


def _note(found: Export) -> str:
    told = {
        "format": FORMAT,
        "topic": DRAFTS.name,
        "since": found.period[0],
        "until": found.period[1],
        "began": found.began,
        "ended": found.ended,
        "rows": found.written,
        "files": found.files,
        "counts": found.counts.as_dict(),
        "offsets": {str(partition): offset for partition, offset in sorted(found.offsets.items())},
        "kept": {"seen": found.intake.seen.runs(), "sequences": found.intake.sequences.known()},
    }
    return json.dumps(told, indent=1) + "\n"


def write_table(path: Path, table: Any) -> None:
    """Put an Arrow ``table`` into the Parquet file at ``path``, whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    import pyarrow.parquet as pq

    atomic_write(path, lambda part: pq.write_table(table, part, compression="zstd"))
