"""What a record teaches: a pure function, and the books of a process that calls it.

:func:`lessons_of` decodes, checks, refuses and samples, and knows no broker: a stage of its own may
call it as well as a learner does. :class:`Intake` has each record once and sets refused ones aside.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import EventRefused, SchemaUnknown
from decoder.contracts.events import EventBatch, Source, decode_batch, encode_batch
from decoder.contracts.fields import LIMITS
from decoder.limited_log import LimitedLog
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.sequences import Sequences
from learner.ingest.source import EventSource, Fetched
from learner.training.rows import Rows, from_batch, taught_by

AHEAD_SECONDS: Final = 86_400.0
"""How far an event's time may lie behind its record's, or behind now: a clock that is wrong by
hours is believed, one in another century would make everything after it look old."""
RECORD_BYTES: Final = 4 << 20
RECORD_ROWS: Final = 4_096
"""Most of a record, which compression makes small: a worker writes 256 rows, and a turn of the loop
ends between two records."""


@dataclass(frozen=True)
class Lessons:
    """Of one record: ``events`` of ``scope``, of which ``drafts`` could be learned from, and
    ``rows`` are.

    ``passed`` more have a draft within limits that are not the worker's own. ``served`` names
    ``target`` and ``drafter``, as far as the worker says. ``predicted`` and ``accepted`` sum up the
    tokens of its drafts whose label is complete, as the worker foresaw them and as they came.
    ``kept`` [rows] are the places of the rows in ``batch``, as it was decoded.
    """

    scope: str
    events: int
    drafts: int
    rows: Rows
    served: Mapping[str, str]
    predicted: float
    accepted: int
    passed: int
    batch: EventBatch
    kept: NDArray[np.intp]


def lessons_of(record: Fetched, shares: Mapping[str, float], now: float) -> Lessons:
    """What ``record`` teaches, as a function of its arguments and of nothing else.

    Args:
        shares: by scope, the share of requests that is learned from, in (0, 1]; 1 where none is
            named. A request is in or out whole, by its hash, so that one in a smaller share is in
            every larger one.
        now: seconds since the epoch.

    Raises:
        EventRefused: it keeps no contract, for whatever reason.
    """
    try:
        if (size := len(record.value)) > RECORD_BYTES:
            raise EventRefused(f"{size} bytes, {RECORD_BYTES} are read at most", "range")
        batch = decode_batch(record.value)
        if len(batch) > RECORD_ROWS:
            raise EventRefused(f"{len(batch)} events, {RECORD_ROWS} are read at most", "range")
        _check_time(batch, record, now)
    except EventRefused:
        raise
    except Exception as failure:  # of a record that lies there, every start would die
        raise EventRefused(f"a record that cannot be read: {failure!r}") from failure
    origin = batch.origin
    named = {"target": origin.target, "drafter": origin.drafter}
    taught = taught_by(batch)
    whole = taught & ~np.array(list(map(bool, batch.names["censored"])))
    predicted, accepted = (
        float(batch.numbers[name][whole].sum()) for name in ("predicted", "accepted")
    )
    rows, kept = from_batch(batch), np.flatnonzero(taught)
    passed = int(np.count_nonzero(batch.numbers["draft_len"])) - len(rows)
    drafts, share = len(rows), shares.get(origin.scope, 1.0)
    if share < 1.0:
        sampled = rows.request < np.uint64(share * 2.0**64)
        rows, kept = rows.take(sampled), kept[sampled]
    if batch.source is not None:  # most of them were left out before
        drafts = round(drafts / batch.source.share)
    return Lessons(
        origin.scope, len(batch), drafts, rows,
        {what: name for what, name in named.items() if name}, predicted, int(accepted), passed,
        batch, kept,
    )  # fmt: skip


def encode_lessons(lessons: Lessons, source: Source) -> bytes:
    """A record of ``hvd.lessons.v2`` with the rows that were kept, at least one.

    Raises:
        EventRefused: as :func:`encode_batch`; nothing that was decoded does so.
    """
    return encode_batch(replace(lessons.batch.take(lessons.kept), source=source))


class Intake:
    """Admits each record once, and hands the refused to ``dead``; not those of another feature
    schema, which an older or a newer worker sends: whole, and for its own learner.

    ``relayed`` says whether records come from an intake, and name their source. ``shares`` are
    those of :func:`lessons_of`. ``refused`` counts records by reason, without an end. ``repeated``
    counts the events of records that came again; ``events`` those of the ``records`` that this
    process admitted.
    """

    def __init__(
        self,
        dead: DeadLetters,
        sequences: Sequences | None = None,
        refused: Mapping[str, int] = {},
        repeated: int = 0,
        shares: Mapping[str, float] = {},
        relayed: bool = False,
    ) -> None:
        self.dead = dead
        self.sequences = sequences or Sequences()
        self.refused = Counter(refused)
        self.repeated = repeated
        self.records = self.events = 0
        self.shares = shares
        self._relayed = relayed
        self._limited_log = LimitedLog()

    def admit(self, record: Fetched) -> Lessons | None:
        """What is new in ``record``; None where it was refused, or came before."""
        lessons = self.read(record)
        return lessons if lessons is not None and self.is_new(record, lessons) else None

    def read(self, record: Fetched) -> Lessons | None:
        """What ``record`` teaches, new or not; None where it was refused."""
        try:
            lessons = lessons_of(record, self.shares, time.time())
            if (lessons.batch.source is not None) != self._relayed:
                raise EventRefused("a record of lessons among drafts, or the reverse", "contract")
        except EventRefused as error:
            self.refused[error.reason] += 1
            if isinstance(error, SchemaUnknown):
                self._limited_log.warning(
                    "draft events of feature schema %r are counted and passed over: their worker "
                    "is of another version than this learner", error.schema,
                )  # fmt: skip
            else:
                self.dead.send(record, error)
            return None
        return lessons

    def is_new(self, record: Fetched, lessons: Lessons) -> bool:
        """Whether what was read of ``record`` has not come before. Mutates."""
        batch, known = lessons.batch, self.sequences
        partition = record.partition if batch.source is None else batch.source.partition
        is_new = known.admit_lesson if self._relayed else known.admit
        if not is_new(batch.origin.life, partition, batch.sequence):
            self.repeated += lessons.events
            return False
        self.records += 1
        self.events += lessons.events
        return True

    def said(self, source: EventSource) -> dict[str, Any]:
        """What a status tells of a process that reads ``source``."""
        lag, read_at = source.lag(), source.read_at
        return {
            "scope": "",
            "time": time.time(),
            "events_duplicate": self.repeated,
            "records_refused": self.refused.total(),
            "refusals": dict(self.refused),
            "dead_letters_failed": self.dead.failed,
            "records_missing": self.sequences.missing,
            "records_duplicate": self.sequences.duplicates,
            "records_skipped": source.skipped,
            "lag": lag,
            "lag_events": round(lag * self.events / max(self.records, 1)),
            "lag_seconds": max(
                time.time() - read_at if lag and read_at else 0.0, source.silent_seconds()
            ),
        }


def _check_time(batch: EventBatch, record: Fetched, now: float) -> None:
    latest = float(batch.numbers["time"].max())
    written = record.timestamp / 1e3
    # a stamp may be of another unit, and the clock here may be wrong
    known = max(now, written if written < LIMITS["time"][1] else 0.0)
    if latest > known + AHEAD_SECONDS:
        raise EventRefused(f"draft events of {latest:.0f} in a record of an earlier day", "range")
