"""Draft events: one row for each cache draft, with its features and its real accepted length.

Rows travel in batches, one batch a Kafka record, as one JSON object in columns: a plain consumer
reads it with ``json.loads``, and the repeated names and near-equal numbers compress well.

::

    {"contract": "hvd.drafts.v1", "schema_id": "...", "scope": "...", "worker": "...",
     "rows": 128, "columns": {"event_id": [...], "accepted": [...], ..., "features": [[...], ...]}}

No text and no token ids ever enter an event. Changes within v1 are additive only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from decoder.contracts.errors import EventRefused
from decoder.contracts.features import NUM_FEATURES, SCHEMA_ID

CONTRACT: Final = "hvd.drafts.v1"

Arm = Literal["cache", "model", "none"]
LabelKind = Literal["verified", "hindsight"]


@dataclass(frozen=True, slots=True)
class DraftEvent:
    """One cache draft and what became of it.

    Lengths are in tokens, times in microseconds unless named otherwise. ``accepted`` is a lower
    bound when ``censored`` names a reason. ``model_accepted`` is None unless the model draft was
    verified in that cycle. ``features`` is the float vector of :data:`FEATURES`.
    """

    event_id: str
    time: float  # seconds since the epoch, at the decision
    request: str  # opaque
    workload: str  # name given by the client for telemetry, or ""
    cycle: int  # index of the cycle within its request
    position: int  # committed output tokens when the draft was proposed
    policy_version: int
    threshold: float
    predicted: float  # expected accepted length of the cache draft
    predicted_model: float  # expected accepted length of the model draft
    arm: Arm
    draft_len: int  # tokens the cache proposed
    verified_len: int  # draft tokens, of either arm, that were verified
    accepted: int
    label: LabelKind
    censored: str  # "" or: length, stop, abort
    model_accepted: int | None
    batch_size: int  # requests in the step
    step_tokens: int  # tokens verified in the step, the whole batch
    draft_us: float  # proposing and deciding, this step
    step_us: float  # from this decision to the next: verification, sampling, scheduling
    features: NDArray[np.float32]


COLUMNS: Final = tuple(f.name for f in fields(DraftEvent))


def encode_batch(events: Sequence[DraftEvent], scope: str, worker: str) -> bytes:
    """One Kafka record value holding ``events``."""
    columns: dict[str, list[Any]] = {
        name: [getattr(e, name) for e in events] for name in COLUMNS if name != "features"
    }
    matrix = np.stack([e.features for e in events]).astype(np.float64).round(5)
    columns["features"] = matrix.tolist()
    record = {
        "contract": CONTRACT,
        "schema_id": SCHEMA_ID,
        "scope": scope,
        "worker": worker,
        "rows": len(events),
        "columns": columns,
    }
    return json.dumps(record, separators=(",", ":")).encode()


class _Columns(BaseModel):
    """Required columns of a record, checked strictly; unknown columns are additive and ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    event_id: list[str]
    time: list[float]
    request: list[str]
    workload: list[str]
    cycle: list[int]
    position: list[int]
    policy_version: list[int]
    threshold: list[float]
    predicted: list[float]
    predicted_model: list[float]
    arm: list[Arm]
    draft_len: list[int]
    verified_len: list[int]
    accepted: list[int]
    label: list[LabelKind]
    censored: list[str]
    model_accepted: list[int | None]
    batch_size: list[int]
    step_tokens: list[int]
    draft_us: list[float]
    step_us: list[float]
    features: list[list[float]]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    contract: Literal["hvd.drafts.v1"]
    schema_id: str
    scope: str
    worker: str
    rows: int
    columns: _Columns


@dataclass(frozen=True)
class EventBatch:
    """A decoded record: where it came from, and its rows."""

    scope: str
    worker: str
    events: tuple[DraftEvent, ...]


def decode_batch(value: bytes) -> EventBatch:
    """Inverse of :func:`encode_batch`.

    Raises:
        EventRefused: not JSON, another contract or feature schema, columns missing, ragged or of
            the wrong type, an accepted length outside ``0..draft_len``, or a number not finite.
    """
    try:
        record = _Record.model_validate_json(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise EventRefused(f"draft-event record refused at {where}: {first['msg']}") from error
    if record.schema_id != SCHEMA_ID:
        raise EventRefused(
            f"draft events of schema {record.schema_id}, this reader has {SCHEMA_ID}"
        )
    columns = record.columns
    lists = {name: getattr(columns, name) for name in COLUMNS}
    if any(len(column) != record.rows for column in lists.values()):
        raise EventRefused(
            f"draft-event record with columns of unequal length ({record.rows} rows)"
        )
    if any(len(row) != NUM_FEATURES for row in columns.features):
        raise EventRefused(f"draft events need {NUM_FEATURES} features each")
    features = np.asarray(columns.features, dtype=np.float32).reshape(-1, NUM_FEATURES)
    numbers = np.asarray([columns.step_us, columns.draft_us, columns.predicted], dtype=np.float64)
    if not (np.isfinite(features).all() and np.isfinite(numbers).all()):
        raise EventRefused("draft-event record with a number that is not finite")
    for accepted, proposed in zip(columns.accepted, columns.draft_len, strict=True):
        if not 0 <= accepted <= proposed:
            raise EventRefused(f"accepted length {accepted} outside 0..{proposed}")
    lists["features"] = list(features)
    rows = (dict(zip(COLUMNS, row, strict=True)) for row in zip(*lists.values(), strict=True))
    return EventBatch(record.scope, record.worker, tuple(DraftEvent(**row) for row in rows))
