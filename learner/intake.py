"""From records to rows: each record once, and what keeps no contract set aside and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Admitted:
    """The new rows of one record: ``events`` of ``scope``, of which ``rows`` have a draft.

    ``passed`` more have one within limits that are not the worker's own.

    ``served`` names ``target`` and ``drafter``, as far as the worker says. ``predicted`` and
    ``accepted`` sum up the tokens of its drafts whose label is complete, as the worker foresaw them
    and as they came.
    """

    scope: str
    events: int
    rows: Rows
    served: Mapping[str, str] = field(default_factory=dict)
    predicted: float = 0.0
    accepted: int = 0
    passed: int = 0


class Intake:
    """Decodes records, admits each once, and hands the refused to ``dead``; not those of another
    feature schema, which an older or a newer worker sends: whole, and for its own learner.

    ``refused`` counts them by reason, without an end. ``repeated`` counts the events of records
    that came again; ``events`` those of the ``records`` that this process admitted.
    """

    def __init__(
        self,
        dead: DeadLetters,
        sequences: Sequences | None = None,
        refused: Mapping[str, int] = {},
        repeated: int = 0,
    ) -> None:
        self.dead = dead
        self.sequences = sequences or Sequences()
        self.refused = Counter(refused)
        self.repeated = repeated
        self.records = self.events = 0
        self._schemas: set[str] = set()
        self._complaints = Complaints()

    def admit(self, record: Fetched) -> Admitted | None:
        """What is new in ``record``; None where it was refused, or came before."""
        try:
            batch = decode_batch(record.value)
            _check_time(batch, record)
        except Exception as failure:  # noqa: BLE001 -- of a record that lies there, every start would die
            error = _refusal(failure)
            self.refused[error.reason] += 1
            if isinstance(error, SchemaUnknown):
                self._pass_over(error.schema)
            else:
                self.dead.send(record, error)
            return None
        if not self.sequences.admit(batch.origin.life, record.partition, batch.sequence):
            self.repeated += len(batch)
            return None
        self.records += 1
        self.events += len(batch)
        origin = batch.origin
        named = {"target": origin.target, "drafter": origin.drafter}
        served = {what: name for what, name in named.items() if name}
        taught = taught_by(batch)
        whole = taught & ~np.array(list(map(bool, batch.names["censored"])))
        predicted, accepted = (
            float(batch.numbers[name][whole].sum()) for name in ("predicted", "accepted")
        )
        rows = from_batch(batch)
        passed = int(np.count_nonzero(batch.numbers["draft_len"])) - len(rows)
        return Admitted(origin.scope, len(batch), rows, served, predicted, int(accepted), passed)

    def _pass_over(self, schema: str) -> None:
        if len(self._schemas) < SCHEMAS:
            self._schemas.add(schema)
        told = schema if schema in self._schemas else "and others"
        self._complaints.warning(
            f"draft events of feature schema {told.replace('%', '%%')!r} are counted and passed "
            "over: their worker is of another version than this learner"
        )


def _refusal(failure: Exception) -> EventRefused:
    if isinstance(failure, EventRefused):
        return failure
    return EventRefused(f"a record that cannot be read: {failure!r}")


def _check_time(batch: EventBatch, record: Fetched) -> None:
    latest = float(batch.numbers["time"].max())
    written = record.timestamp / 1e3
    # a stamp may be of another unit, and the clock here may be wrong
    known = max(time.time(), written if written < LIMITS["time"][1] else 0.0)
    if latest > known + AHEAD_SECONDS:
        raise EventRefused(f"draft events of {latest:.0f} in a record of an earlier day", "range")
