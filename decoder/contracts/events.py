"""Draft events: one row for each decoding cycle, with what was proposed and what became of it.

Rows travel in batches, one batch a Kafka record, as one JSON object in columns: a plain consumer
reads it with ``json.loads``, and the repeated names and near-equal numbers compress well. Features
are columns of their own names, null where a cycle had no cache draft.

::

    {"contract": "hvd.drafts.v2", "schema_id": "...", "scope": "...", "worker": "...",
     "life": "...", "target": "...", "drafter": "...", "sequence": 7, "rows": 128,
     "columns": {"number": [...], "accepted": [...], ...},
     "features": {"log_score": [...], ...}}

A record of ``hvd.lessons.v2`` is one of these that holds only what is learned from, and names its
``source``.

No text and no token ids ever enter an event, and names only as pseudonyms: what is not one when it
comes here leaves as one. Changes within v2 are additive only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import isfinite, isnan, nan
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticSerializationError, to_json

from decoder.contracts.bundle import ANY_SCOPE, MAX_DRAFT
from decoder.contracts.errors import EventRefused, SchemaUnknown
from decoder.contracts.features import FEATURES, NUM_FEATURES, SCHEMA_ID, FloatArray
from decoder.contracts.identity import Named, Pseudonyms, is_pseudonym, is_readable

CONTRACT: Final = "hvd.drafts.v2"

Arm = str
"""``cache``, ``model``, ``none``; readers keep arms that they do not know."""
LabelKind = Literal["verified", "hindsight", ""]


class DraftEvent(NamedTuple):
    """One decoding cycle and what became of its draft.

    Lengths are in tokens, times in microseconds unless named otherwise. ``accepted`` is a lower
    bound when ``censored`` names a reason. ``model_accepted`` is None unless the model draft was
    verified in that cycle. ``features`` is the float32 vector of :data:`FEATURES`; None, with a
    ``draft_len`` of 0 and a ``label`` of "", where the cache proposed nothing.

    A tuple, since one is made in every cycle: a frozen dataclass of as many fields takes three
    times as long.
    """

    number: int  # of the event within its worker's life, from 0; those that were dropped included
    time: float  # seconds since the epoch, at the decision
    request: str  # pseudonym
    tenant: str  # pseudonym, or ""
    session: str  # pseudonym, or ""
    choice: int  # which of the choices (n > 1) of one client request
    workload: str  # short name given by the client for telemetry, a pseudonym, or ""
    cycle: int  # index of the cycle within its request
    position: int  # committed output tokens when the draft was proposed
    policy_version: int
    publication: int  # number of the policy's publication; 0: it came with the worker
    role: str  # of the policy in force: champion, trial, first
    side: str  # of a trial; "" outside
    parameter: float  # the decision parameter in force
    parameter_name: str  # rate or threshold
    predicted: float  # expected accepted length of the cache draft
    predicted_model: float  # expected accepted length of the model draft
    arm: Arm
    draft_len: int  # tokens the cache proposed
    drafted_len: int  # draft tokens, of the chosen arm, that were really made
    verified_len: int  # of these, the ones that were verified
    accepted: int  # of the cache draft
    label: LabelKind
    censored: str  # "" or: length, stop, abort
    model_accepted: int | None
    batch_size: int  # requests in the step
    step_tokens: int  # tokens verified in the step, the whole batch
    draft_us: float  # proposing and deciding, this step
    step_us: float  # from this decision to the next: verification, sampling, scheduling
    share: float  # chance that its request was told of at all; 1 unless load was shed
    features: FloatArray | None


COLUMNS: Final = DraftEvent._fields[:-1]
"""Columns beside the features."""

_COUNT: Final = (0, 2**31 - 1)
_TOKENS: Final = (0, MAX_DRAFT)
_EXPECTED: Final = (0.0, 2.0 * MAX_DRAFT)
_MICROSECONDS: Final = (0.0, 1e12)
LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "number": (0, 2**53),
    "time": (0.0, 2.0**36),
    "choice": _COUNT,
    "cycle": _COUNT,
    "position": _COUNT,
    "policy_version": _COUNT,
    "publication": (0, 2**53),
    "parameter": (-1e12, 1e12),
    "predicted": _EXPECTED,
    "predicted_model": _EXPECTED,
    "draft_len": _TOKENS,
    "drafted_len": _TOKENS,
    "verified_len": _TOKENS,
    "accepted": _TOKENS,
    "batch_size": (1, 2**20),
    "step_tokens": _COUNT,
    "draft_us": _MICROSECONDS,
    "step_us": _MICROSECONDS,
    "share": (0.0, 1.0),
}
"""Least and greatest value of each number: one absurd one, believed, would spoil whatever is
learned or added up from the rest."""
FEATURE_LIMIT: Final = 1e9
DECIMALS: Final = 5
"""Of features on the wire."""
NAME_LENGTH: Final = 64
VEILED: Final[tuple[Named, ...]] = ("request", "tenant", "session", "workload")
"""Columns of names, which leave as pseudonyms."""
_OPEN: Final = ("arm", "role", "side", "parameter_name", "censored")
_STRANGERS: Final = Pseudonyms()
"""Stands in where a name came without the pseudonym that the operator's key would give it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where records come from: ``life`` is a random id of the worker's process.

    ``target`` and ``drafter`` are what a person calls the models; "" where a worker does not say,
    or has no drafter.
    """

    scope: str
    worker: str
    life: str
    target: str = ""
    drafter: str = ""


@dataclass(frozen=True)
class Source:
    """Where a record of lessons comes from: the place of the record of drafts that holds them, and
    of which share of the requests it holds what is learned from."""

    partition: Annotated[int, Field(ge=0, le=2**31 - 1)]
    offset: Annotated[int, Field(ge=0, le=2**53)]
    share: Annotated[float, Field(ge=2.0**-30, le=1.0)]


@dataclass(frozen=True)
class EventBatch:
    """A decoded record of ``n`` events, in columns: every number in it is within its range.

    ``numbers`` are int64 or float64 [n] by name, ``model_accepted`` NaN where there is none;
    ``names`` are what is text. ``features`` is float32 [n, features], NaN where there was no draft.
    """

    origin: Origin
    sequence: int
    numbers: Mapping[str, NDArray[Any]]
    names: Mapping[str, list[str]]
    features: FloatArray
    source: Source | None = None

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def events(self) -> tuple[DraftEvent, ...]:
        """The same, a tuple a row: for readers to whom a few microseconds an event are nothing."""
        lists = {name: column.tolist() for name, column in self.numbers.items()} | dict(self.names)
        model = [None if isnan(length) else int(length) for length in lists["model_accepted"]]
        columns = [lists[name] for name in COLUMNS if name != "model_accepted"]
        columns.insert(COLUMNS.index("model_accepted"), model)
        drafts = zip(self.features, lists["draft_len"], strict=True)
        features = [vector if length else None for vector, length in drafts]
        return tuple(DraftEvent(*row) for row in zip(*columns, features, strict=True))


def encode_batch(events: Sequence[DraftEvent], origin: Origin, sequence: int) -> bytes:
    """One Kafka record value holding ``events``, at least one.

    Args:
        sequence: records of this life that the partition holds already.

    Raises:
        EventRefused: an event holds a number out of range or something that is no number; whoever
            finds out which by halving loses no other.
    """
    *columns, features = map(list, zip(*events, strict=True))
    matrix = np.full((len(events), NUM_FEATURES), np.nan)
    drafts = [i for i, row in enumerate(features) if row is not None]
    try:
        if drafts:
            matrix[drafts] = np.stack([features[i] for i in drafts])
    except (TypeError, ValueError) as error:
        raise EventRefused(f"draft events cannot be written: {error}") from error
    return encode_columns(dict(zip(COLUMNS, columns, strict=True)), matrix, origin, sequence)


def encode_columns(
    columns: Mapping[str, list[Any]],
    features: NDArray[np.float64],
    origin: Origin,
    sequence: int,
    source: Source | None = None,
) -> bytes:
    """The same of lists by column, in the order of :data:`COLUMNS`.

    Args:
        features: float64 [n, features], NaN where a row had no draft.
    """
    try:
        named = dict(columns)
        for kind in VEILED:
            named[kind] = _veiled(kind, named[kind])
        _check(named, [n for n in named["model_accepted"] if n is not None], features)
        record = {
            "contract": CONTRACT,
            "schema_id": SCHEMA_ID,
            "scope": origin.scope,
            "worker": origin.worker,
            "life": origin.life,
            "target": origin.target,
            "drafter": origin.drafter,
            "sequence": sequence,
            "rows": len(features),
            "columns": named,
            "features": dict(zip(FEATURES, features.round(DECIMALS).T.tolist(), strict=True)),
        }
        if source is not None:
            record["source"] = vars(source)
        return to_json(record, inf_nan_mode="null", fallback=np.generic.item)
    except (TypeError, ValueError, OverflowError, PydanticSerializationError) as error:
        raise EventRefused(f"draft events cannot be written: {error}") from error


def _veiled(kind: Named, names: list[str]) -> list[str]:
    """``names`` as they may leave."""
    veils = {name: veiled(kind, name) for name in set(names)}
    return [veils[name] for name in names]


def veiled(kind: Named, name: str) -> str:
    """``name`` as it may leave: itself, or a pseudonym of no key that anybody holds."""
    if name == "" or is_pseudonym(name) or (kind == "workload" and is_readable(name)):
        return name
    return _STRANGERS.of(kind, name)


Column = list[Any] | NDArray[Any]


def _check(columns: Mapping[str, Column], model: Column, features: NDArray[np.float64]) -> None:
    """Refuse numbers out of range and rows that contradict themselves.

    Args:
        columns: lists to be written, or what was read: numbers as arrays.
        model: ``model_accepted`` where there is one.
        features: float64 [n, features], rows of NaN where there was no cache draft.
    """
    for name, (low, high) in LIMITS.items():
        least, most = _ends(columns[name])
        if not (low <= least and most <= high):
            raise EventRefused(f"draft events with a {name} outside {low:g}..{high:g}", "range")
    least, most = _ends(model) if len(model) else (0, 0)
    if not (least >= 0 and most <= MAX_DRAFT):
        raise EventRefused(f"draft events with a model_accepted outside 0..{MAX_DRAFT}", "range")
    for name in _OPEN:
        if max(map(len, set(columns[name]))) > NAME_LENGTH:
            raise EventRefused(f"draft events with a {name} of more than {NAME_LENGTH} characters")
    drafted = np.asarray(columns["draft_len"])
    if (np.asarray(columns["accepted"]) > drafted).any():
        raise EventRefused("draft events of which more was accepted than proposed", "range")
    if not (np.abs(features[drafted > 0]) <= FEATURE_LIMIT).all():
        raise EventRefused(
            f"draft events with a feature that is no number within {FEATURE_LIMIT:g}", "range"
        )
    if not np.isnan(features[drafted <= 0]).all():
        raise EventRefused("draft events with features of no draft", "range")


def _ends(column: Column) -> tuple[float, float]:
    """Least and greatest of ``column``; NaN where one of them is no finite number."""
    if isinstance(column, np.ndarray):  # whole numbers stay so: 2**53 + 1 is no float
        return column.min().item(), column.max().item()
    ends = min(column), max(column)
    return ends if isfinite(sum(column)) else (nan, nan)


Short = Annotated[str, StringConstraints(max_length=NAME_LENGTH)]
Line = Annotated[str, StringConstraints(max_length=256)]
Served = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,64}$")]


_HINTS: Final = get_type_hints(DraftEvent)
DraftColumns = create_model(  # type: ignore[call-overload]
    "DraftColumns",
    __config__=ConfigDict(strict=True, extra="ignore"),
    __doc__="""Columns of a record, checked strictly; unknown columns are additive and ignored.

    ``share`` came later: records of before have none, and every request of theirs was told of.
    """,
    **{
        name: (GenericAlias(list, ({str: Short}.get(kind, kind),)), [] if name == "share" else ...)
        for name, kind in _HINTS.items()
        if name in COLUMNS
    },
)


class DraftRecord(BaseModel):
    """A record as it is read, but for the ranges of its numbers, which are checked by column."""

    model_config = ConfigDict(strict=True, extra="ignore")

    contract: Literal["hvd.drafts.v2"]
    schema_id: Line
    scope: Annotated[str, StringConstraints(pattern=r"^[a-z0-9._-]{1,64}$")]
    worker: Line
    life: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,32}$")]
    target: Served = ""
    drafter: Served = ""
    sequence: int
    rows: int
    columns: DraftColumns  # type: ignore[valid-type]
    features: dict[str, list[float | None]]
    source: Source | None = None


def decode_batch(value: bytes) -> EventBatch:
    """Inverse of :func:`encode_batch`.

    Raises:
        EventRefused: not JSON, another contract or feature schema, columns missing, ragged or of
            the wrong type, or a number out of its range; the record is refused whole.
    """
    try:
        return _decoded(DraftRecord.model_validate_json(value))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        reason = "contract" if where == "contract" else "malformed"
        raise EventRefused(
            f"draft-event record refused at {where}: {first['msg']}", reason
        ) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EventRefused(f"draft-event record refused: {error}") from error


def _decoded(record: DraftRecord) -> EventBatch:
    if record.scope == ANY_SCOPE:
        raise EventRefused("draft events of no scope: a worker has one of its own", "range")
    if record.schema_id != SCHEMA_ID:
        raise SchemaUnknown(record.schema_id, SCHEMA_ID)
    if not 0 <= record.sequence <= 2**53:
        raise EventRefused(f"draft-event record of sequence {record.sequence}", "range")
    columns = {name: getattr(record.columns, name) for name in COLUMNS}
    columns["share"] = columns["share"] or [1.0] * record.rows
    if record.features.keys() != set(FEATURES):
        raise EventRefused("draft-event record without one column for each feature", "schema")
    lengths = {len(c) for part in (columns, record.features) for c in part.values()}
    if lengths != {record.rows} or not record.rows:
        raise EventRefused(
            f"draft-event record with columns of {sorted(lengths)} rows, {record.rows} announced"
        )
    numbers = {name: np.array(columns[name], _DTYPES[name]) for name in _DTYPES}
    flat = chain.from_iterable(record.features[name] for name in FEATURES)
    matrix = np.fromiter(flat, np.float64, NUM_FEATURES * record.rows).reshape(NUM_FEATURES, -1).T
    names = {name: columns[name] for name in COLUMNS if name not in numbers}
    model = numbers["model_accepted"]
    _check({**numbers, **names}, model[~np.isnan(model)], matrix)
    features = np.ascontiguousarray(matrix, np.float32)
    origin = Origin(record.scope, record.worker, record.life, record.target, record.drafter)
    return EventBatch(origin, record.sequence, numbers, names, features, record.source)


_DTYPES: Final[Mapping[str, type[np.generic]]] = {
    name: np.int64 if _HINTS[name] is int else np.float64
    for name in COLUMNS
    if _HINTS[name] in (int, float, int | None)
}
"""Columns of numbers, by what they are read as."""
