"""Draft events: one row for each decoding cycle, with the draft and its outcome.

A Kafka record is a batch of rows, as one JSON object in columns: a plain consumer reads it with
``json.loads``, and repeated names and similar numbers compress well. Each feature is a column, null
where a cycle had no cache draft.

::

    {"contract": "hvd.drafts.v2", "schema_id": "...", "scope": "...", "worker": "...",
     "life": "...", "target": "...", "drafter": "...", "sequence": 7, "rows": 128,
     "columns": {"number": [...], "accepted": [...], ...},
     "features": {"log_score": [...], ...}}

A record of ``hvd.lessons.v2`` has the same form: the rows to train on, and their ``source``.
:data:`decoder.contracts.fields.FIELDS` defines the columns.

An event never holds text or token ids. Names are pseudonyms; any other name is pseudonymised here.
Changes within v2 are additive only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Annotated, Any, Final, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, ValidationError
from pydantic_core import from_json

from decoder.contracts import fields
from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import EventRefused, SchemaUnknown
from decoder.contracts.features import FEATURES, SCHEMA_ID, FloatArray
from decoder.contracts.fields import FIELDS, NAME_LENGTH, NUMBERS, STRINGS
from decoder.contracts.identity import Named, Pseudonyms, is_pseudonym, is_readable

CONTRACT: Final = "hvd.drafts.v2"

Arm = str
"""``cache``, ``model``, ``none``; readers keep unknown arms."""

FEATURE_LIMIT: Final = 1e9
DECIMALS: Final = 5
"""Decimals of features on the topic."""
PSEUDONYMISED: Final[tuple[Named, ...]] = ("request", "tenant", "session", "workload")
"""Columns of names, which are sent as pseudonyms."""
_FALLBACK: Final = Pseudonyms()  # for names that were not pseudonymised with the operator's key


@dataclass(frozen=True, slots=True)
class Origin:
    """The worker that a record comes from; ``life`` is a random id of its process (incarnation).

    ``target`` and ``drafter`` are readable names of the models; "" where there is none.
    """

    scope: str
    worker: str
    life: str
    target: str = ""
    drafter: str = ""


@dataclass(frozen=True)
class Source:
    """The origin of a record of lessons: partition and offset of the record of drafts, and the
    share of requests that was sampled for training."""

    partition: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
    offset: Annotated[int, Field(strict=True, ge=0, le=2**53)]
    share: Annotated[float, Field(strict=True, ge=2.0**-30, le=1.0)]


@dataclass(frozen=True)
class EventBatch:
    """A record of ``n`` events, in columns.

    ``numbers`` are integer or float64 arrays [n] by name, -1 where a nullable one is null;
    ``names`` are lists of n strings. ``features`` is float32 [n, features], undefined where
    ``draft_len`` is 0. ``sequence`` is the number of earlier records of this life in the partition.
    """

    origin: Origin
    sequence: int
    numbers: Mapping[str, NDArray[Any]]
    names: Mapping[str, list[str]]
    features: FloatArray
    source: Source | None = None

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: NDArray[np.intp]) -> EventBatch:
        """The events at ``rows``, copied."""
        numbers = {name: column[rows] for name, column in self.numbers.items()}
        names = {name: [column[row] for row in rows] for name, column in self.names.items()}
        return replace(self, numbers=numbers, names=names, features=self.features[rows])


def encode_batch(batch: EventBatch) -> bytes:
    """The Kafka record value of ``batch``, which has at least one event.

    Raises:
        EventRefused: an event holds a number out of range or a malformed string; a caller can
            isolate it by halving the batch.
    """
    names = dict(batch.names)
    for kind in PSEUDONYMISED:
        pseudonyms = {name: pseudonymised(kind, name) for name in set(names[kind])}
        names[kind] = [pseudonyms[name] for name in names[kind]]
    for field in STRINGS:
        _check_strings(field, names[field.name])
    _check(batch.numbers, batch.features[batch.numbers["draft_len"] > 0])
    columns: dict[str, Any] = {}
    for field in FIELDS:
        if field.kind == "string":
            columns[field.name] = names[field.name]
        elif field.nullable:
            values = batch.numbers[field.name].tolist()
            columns[field.name] = [None if value < 0 else value for value in values]
        else:
            columns[field.name] = np.ascontiguousarray(batch.numbers[field.name])
    features = batch.features.astype(np.float64).round(DECIMALS)
    features[batch.numbers["draft_len"] == 0] = np.nan  # null
    record = {
        "contract": CONTRACT,
        "schema_id": SCHEMA_ID,
        **asdict(batch.origin),
        "sequence": batch.sequence,
        "rows": len(batch),
        "columns": columns,
        "features": dict(zip(FEATURES, np.ascontiguousarray(features.T, np.float32), strict=True)),
    }
    if batch.source is not None:
        record["source"] = asdict(batch.source)
    try:
        return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise EventRefused(f"draft events cannot be written: {error}") from error


def pseudonymised(kind: Named, name: str) -> str:
    """``name`` where it may be sent as it is, else its pseudonym under a random key."""
    if name == "" or is_pseudonym(name) or (kind == "workload" and is_readable(name)):
        return name
    return _FALLBACK.of(kind, name)


def _check(numbers: Mapping[str, NDArray[Any]], features: NDArray[Any]) -> None:
    """Refuse numbers out of range, and inconsistent rows.

    Args:
        features: [drafts, features], of the rows with a draft.

    Raises:
        EventRefused: at the first of them.
    """
    for field in NUMBERS:
        (low, high), column = field.limits, numbers[field.name]
        # Integers are compared as integers, since 2**53 + 1 is no float; NaN is in no range.
        if not (low - field.nullable <= column.min().item() and column.max().item() <= high):
            raise EventRefused(
                f"draft events with a {field.name} outside {low:g}..{high:g}", "range"
            )
    if (numbers["accepted"] > numbers["draft_len"]).any():
        raise EventRefused("draft events with more tokens accepted than proposed", "range")
    if not (np.abs(features) <= FEATURE_LIMIT).all():
        raise EventRefused(
            f"draft events with a feature that is no number within {FEATURE_LIMIT:g}", "range"
        )


def _check_strings(field: fields.Field, column: list[str]) -> None:
    values = set(column)
    if max(map(len, values)) > NAME_LENGTH:
        raise EventRefused(
            f"draft events with a {field.name} of more than {NAME_LENGTH} characters"
        )
    if field.words and not values <= set(field.words):
        raise EventRefused(f"draft events with a {field.name} that is none of {field.words}")


Line = Annotated[str, StringConstraints(strict=True, max_length=256)]
Served = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9._-]{0,64}$")]


class DraftRecord(BaseModel):
    """A record; the values in its columns are checked later, as arrays.

    Unknown fields and columns are additive and ignored.
    """

    model_config = ConfigDict(extra="ignore")

    contract: Literal["hvd.drafts.v2"]
    schema_id: Line
    scope: Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z0-9._-]{1,64}$")]
    worker: Line
    life: Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{1,32}$")]
    target: Served = ""
    drafter: Served = ""
    sequence: StrictInt
    rows: StrictInt
    columns: dict[str, Any]
    features: dict[str, list[Any]]
    source: Source | None = None


def decode_batch(value: bytes) -> EventBatch:
    """Inverse of :func:`encode_batch`; every number in the result is within its range.

    Raises:
        EventRefused: not JSON, another contract or feature schema, columns missing, ragged or of
            the wrong type, or a number out of its range; the record is refused whole.
    """
    try:
        return _decoded(DraftRecord.model_validate(_parsed(value)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        reason = "contract" if where == "contract" else "malformed"
        raise EventRefused(
            f"draft-event record refused at {where}: {first['msg']}", reason
        ) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EventRefused(f"draft-event record refused: {error}") from error


def _parsed(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return from_json(value)  # accepts NaN and Infinity, which the range check refuses


def _decoded(record: DraftRecord) -> EventBatch:
    numbers, names = dict[str, NDArray[Any]](), dict[str, list[str]]()
    absent = dict[str, Any]()
    for field in FIELDS:
        column = record.columns.get(field.name, [])
        if field.optional is not None and column == []:
            absent[field.name] = field.dtype.type(field.optional)
        elif type(column) is not list:
            raise EventRefused(f"draft-event record refused at columns.{field.name}: no list")
        elif field.kind == "string":
            _check_strings(field, column)
            names[field.name] = column
        else:
            numbers[field.name] = _array(field, column)
    _check_record(record)
    columns: tuple[Sized, ...] = (*numbers.values(), *names.values(), *record.features.values())
    if (lengths := set(map(len, columns))) != {record.rows} or not record.rows:
        raise EventRefused(
            f"draft-event record with columns of {sorted(lengths)} rows, {record.rows} announced"
        )
    numbers |= {name: np.full(record.rows, value) for name, value in absent.items()}
    return EventBatch(
        Origin(record.scope, record.worker, record.life, record.target, record.drafter),
        record.sequence, numbers, names, _features(record, numbers), record.source,
    )  # fmt: skip


def _check_record(record: DraftRecord) -> None:
    """Refuse a record of another schema, or of no single scope."""
    if record.scope == ANY_SCOPE:
        raise EventRefused(f"draft events of scope {ANY_SCOPE}: a worker has its own", "range")
    if record.schema_id != SCHEMA_ID:
        _check_types(record)
        raise SchemaUnknown(record.schema_id, SCHEMA_ID)
    if not 0 <= record.sequence <= 2**53:
        raise EventRefused(f"draft-event record of sequence {record.sequence}", "range")
    if record.features.keys() != set(FEATURES):
        raise EventRefused("draft-event record without one column for each feature", "schema")


def _array(field: fields.Field, column: list[Any]) -> NDArray[Any]:
    """``column`` as numbers, -1 for null.

    Raises:
        OverflowError: a value is out of its type's range.
    """
    allowed = {int} if field.kind == "integer" else {int, float}
    if not set(map(type, column)) - ({type(None)} if field.nullable else set()) <= allowed:
        raise EventRefused(f"draft events with a {field.name} that is no {field.kind}")
    if field.nullable:
        if min((value for value in column if value is not None), default=0) < 0:
            raise EventRefused(f"draft events with a negative {field.name}", "range")
        column = [-1 if value is None else value for value in column]
    return np.array(column, np.int64 if field.kind == "integer" else np.float64)


def _features(record: DraftRecord, numbers: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Float32 [n, features], NaN in rows without a draft, in which all must be null. Also checks
    ``numbers``."""
    _check_types(record)
    drafted = numbers["draft_len"] > 0
    features = np.array([record.features[name] for name in FEATURES], np.float64).T
    if not np.isnan(features[~drafted]).all():
        raise EventRefused("draft events with features of no draft", "range")
    _check(numbers, features[drafted])
    return features.astype(np.float32)


def _check_types(record: DraftRecord) -> None:
    if not set(map(type, chain.from_iterable(record.features.values()))) <= _FEATURE:
        raise EventRefused("draft events with a feature that is no number")


_FEATURE: Final = {int, float, type(None)}
