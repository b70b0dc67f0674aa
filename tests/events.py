"""Draft events one by one, for tests that begin with events or ask for single ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from decoder.contracts.events import Arm, EventBatch, Origin, encode_batch
from decoder.contracts.features import NUM_FEATURES, FloatArray
from decoder.contracts.fields import FIELDS, NUMBERS, STRINGS
from learner.training.rows import Rows, from_batch
from pipelines.replay.events import ORIGIN, EventLog


class DraftEvent(NamedTuple):
    """One decoding cycle; ``features`` and ``model_accepted`` are None where there are none."""

    number: int
    time: float
    request: str
    tenant: str
    session: str
    choice: int
    workload: str
    cycle: int
    position: int
    policy_version: int
    publication: int
    role: str
    side: str
    round: int | None
    parameter: float
    parameter_name: str
    predicted: float
    predicted_model: float
    arm: Arm
    draft_len: int
    drafted_len: int
    verified_len: int
    accepted: int
    label: str
    censored: str
    model_accepted: int | None
    batch_size: int
    step_tokens: int
    draft_us: float
    step_us: float
    share: float
    features: FloatArray | None


def batch_of(
    events: Sequence[DraftEvent], origin: Origin = ORIGIN, sequence: int = 0
) -> EventBatch:
    """``events`` as a batch of them holds them."""
    lists = zip(*events, strict=True) if events else [()] * len(DraftEvent._fields)
    columns = dict(zip(DraftEvent._fields, lists, strict=True))
    numbers = {
        field.name: np.array(
            [-1 if value is None else value for value in columns[field.name]],
            np.int64 if field.kind == "integer" else np.float64,
        )
        for field in NUMBERS
    }
    features = np.full((len(events), NUM_FEATURES), np.nan, np.float32)
    for row, vector in enumerate(columns["features"]):
        if vector is not None:
            features[row] = vector
    names = {field.name: list(columns[field.name]) for field in STRINGS}
    return EventBatch(origin, sequence, numbers, names, features)


def encode_events(events: Sequence[DraftEvent], origin: Origin, sequence: int) -> bytes:
    """A record of ``events``."""
    return encode_batch(batch_of(events, origin, sequence))


def events_of(batch: EventBatch) -> list[DraftEvent]:
    """The events of a batch."""
    lists: dict[str, list[Any]] = {n: column.tolist() for n, column in batch.numbers.items()}
    lists |= batch.names
    for name in (field.name for field in NUMBERS if field.nullable):
        lists[name] = [None if n < 0 else n for n in lists[name]]
    drafts = zip(batch.features, lists["draft_len"], strict=True)
    features = [vector if length else None for vector, length in drafts]
    columns = [lists[field.name] for field in FIELDS]
    return [DraftEvent(*row) for row in zip(*columns, features, strict=True)]


def from_events(events: Sequence[DraftEvent]) -> Rows:
    """What learning makes of ``events``."""
    return from_batch(batch_of(events))


class KeepingLog(EventLog):
    """A log that tells its events one by one."""

    @property
    def every(self) -> list[DraftEvent]:
        """All of them."""
        return events_of(self.batch())

    @property
    def events(self) -> list[DraftEvent]:
        """Those of cache drafts."""
        return [event for event in self.every if event.draft_len]
