"""What a record teaches: a pure function, and the books of a process that calls it.

:func:`lessons_of` decodes, checks, refuses and samples, and knows no broker: a stage of its own may
call it as well as a learner does. :class:`Intake` has each record once and sets refused ones aside.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from decoder.complaints import Complaints
from decoder.contracts.errors import EventRefused, SchemaUnknown
from decoder.contracts.events import LIMITS, EventBatch, decode_batch
from learner.dead_letters import DeadLetters
from learner.rows import Rows, from_batch, taught_by
from learner.sequences import Sequences
from learner.source import Fetched

AHEAD_SECONDS: Final = 86_400.0
"""How far an event's time may lie behind its record's, or behind now: a clock that is wrong by
hours is believed, one in another century would make everything after it look old."""
SCHEMAS: Final = 20
"""Feature schemas of others that are told apart; anybody may make more up."""


@dataclass(frozen=True)
class Lessons:
    """Of one record, with number ``sequence`` of worker ``life``: ``events`` of ``scope``, of which
    ``drafts`` could be learned from, and ``rows`` are.

    ``passed`` more have a draft within limits that are not the worker's own. ``served`` names
    ``target`` and ``drafter``, as far as the worker says. ``predicted`` and ``accepted`` sum up the
    tokens of its drafts whose label is complete, as the worker foresaw them and as they came.
    """

    scope: str
    life: str
    sequence: int
    events: int
    drafts: int
    rows: Rows
    served: Mapping[str, str]
    predicted: float
    accepted: int
    passed: int


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
        batch = decode_batch(record.value)
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
    rows = from_batch(batch)
    drafts, share = len(rows), shares.get(origin.scope, 1.0)
    if share < 1.0:
        rows = rows.take(rows.request < np.uint64(share * 2.0**64))
    return Lessons(
        origin.scope, origin.life, batch.sequence, len(batch), drafts, rows,
        {what: name for what, name in named.items() if name}, predicted, int(accepted),
        int(np.count_nonzero(batch.numbers["draft_len"])) - drafts,
    )  # fmt: skip


class Intake:
    """Admits each record once, and hands the refused to ``dead``; not those of another feature
    schema, which an older or a newer worker sends: whole, and for its own learner.

    ``shares`` are those of :func:`lessons_of`. ``refused`` counts records by reason, without an
    end. ``repeated`` counts the events of records that came again; ``events`` those of the
    ``records`` that this process admitted.
    """

    def __init__(
        self,
        dead: DeadLetters,
        sequences: Sequences | None = None,
        refused: Mapping[str, int] = {},
        repeated: int = 0,
        shares: Mapping[str, float] = {},
    ) -> None:
        self.dead = dead
        self.sequences = sequences or Sequences()
        self.refused = Counter(refused)
        self.repeated = repeated
        self.records = self.events = 0
        self._shares = shares
        self._schemas: set[str] = set()
        self._complaints = Complaints()

    def admit(self, record: Fetched) -> Lessons | None:
        """What is new in ``record``; None where it was refused, or came before."""
        try:
            lessons = lessons_of(record, self._shares, time.time())
        except EventRefused as error:
            self.refused[error.reason] += 1
            if isinstance(error, SchemaUnknown):
                self._pass_over(error.schema)
            else:
                self.dead.send(record, error)
            return None
        if not self.sequences.admit(lessons.life, record.partition, lessons.sequence):
            self.repeated += lessons.events
            return None
        self.records += 1
        self.events += lessons.events
        return lessons

    def _pass_over(self, schema: str) -> None:
        if len(self._schemas) < SCHEMAS:
            self._schemas.add(schema)
        told = schema if schema in self._schemas else "and others"
        self._complaints.warning(
            f"draft events of feature schema {told.replace('%', '%%')!r} are counted and passed "
            "over: their worker is of another version than this learner"
        )


def _check_time(batch: EventBatch, record: Fetched, now: float) -> None:
    latest = float(batch.numbers["time"].max())
    written = record.timestamp / 1e3
    # a stamp may be of another unit, and the clock here may be wrong
    known = max(now, written if written < LIMITS["time"][1] else 0.0)
    if latest > known + AHEAD_SECONDS:
        raise EventRefused(f"draft events of {latest:.0f} in a record of an earlier day", "range")
