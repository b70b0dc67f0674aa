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
``source``. What the columns are says :data:`decoder.contracts.fields.FIELDS`.

No text and no token ids ever enter an event, and names only as pseudonyms: what is not one when it
comes here leaves as one. Changes within v2 are additive only.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass, replace
from itertools import chain, compress
from typing import Annotated, Any, Final, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import from_json

from decoder.contracts import fields
from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import EventRefused, SchemaUnknown
from decoder.contracts.features import FEATURES, SCHEMA_ID, FloatArray
from decoder.contracts.fields import COLUMNS, FIELDS, NAME_LENGTH, NUMBERS, STRINGS
from decoder.contracts.identity import Named, Pseudonyms, is_pseudonym, is_readable

CONTRACT: Final = "hvd.drafts.v2"

Arm = str
"""``cache``, ``model``, ``none``; readers keep arms that they do not know."""

FEATURE_LIMIT: Final = 1e9
DECIMALS: Final = 5
"""Of features on the topic."""
PSEUDONYMISED: Final[tuple[Named, ...]] = ("request", "tenant", "session", "workload")
"""Columns of names, which leave as pseudonyms."""
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
    """A record of ``n`` events, in columns.

    ``numbers`` are integer or float64 arrays [n] by name, -1 where a nullable one is null;
    ``names`` are the strings, n of them each. ``features`` is float32 [n, features]; its rows mean
    nothing where ``draft_len`` is 0. ``sequence`` counts the records of this life that the
    partition held before.
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
    """One Kafka record value holding ``batch``, of at least one event.

    Raises:
        EventRefused: an event holds a number out of range or a string that is none; whoever finds
            out which by halving loses no other.
    """
    names = dict(batch.names)
    for kind in PSEUDONYMISED:
        leaving = {name: pseudonymised(kind, name) for name in set(names[kind])}
        names[kind] = [leaving[name] for name in names[kind]]
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
    """``name`` as it may leave: itself, or a pseudonym of no key that anybody holds."""
    if name == "" or is_pseudonym(name) or (kind == "workload" and is_readable(name)):
        return name
    return _STRANGERS.of(kind, name)


def _check(numbers: Mapping[str, NDArray[Any]], features: NDArray[Any]) -> None:
    """Refuse numbers out of range, and rows that contradict themselves.

    Args:
        features: [drafts, features], of the rows with a draft.

    Raises:
        EventRefused: the first of them.
    """
    for field in NUMBERS:
        (low, high), column = field.limits, numbers[field.name]
        # Whole numbers stay so, since 2**53 + 1 is no float; a NaN is in no range.
        if not (low - field.nullable <= column.min().item() and column.max().item() <= high):
            raise EventRefused(
                f"draft events with a {field.name} outside {low:g}..{high:g}", "range"
            )
    if (numbers["accepted"] > numbers["draft_len"]).any():
        raise EventRefused("draft events of which more was accepted than proposed", "range")
    if not (np.abs(features) <= FEATURE_LIMIT).all():
        raise EventRefused(
            f"draft events with a feature that is no number within {FEATURE_LIMIT:g}", "range"
        )


def _check_strings(field: fields.Field, column: list[str]) -> None:
    said = set(column)
    if max(map(len, said)) > NAME_LENGTH:
        raise EventRefused(
            f"draft events with a {field.name} of more than {NAME_LENGTH} characters"
        )
    if field.words and not said <= set(field.words):
        raise EventRefused(f"draft events with a {field.name} that is none of {field.words}")


Line = Annotated[str, StringConstraints(max_length=256)]
Served = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,64}$")]


_SOURCE: Final = TypeAdapter[Any](Source)


def _source(value: Any) -> Any:
    """A strict dataclass is made of JSON, and of no dictionary."""
    return value and _SOURCE.validate_json(orjson.dumps(value), strict=True)


class DraftRecord(BaseModel):
    """A record but for what is in its columns, which are checked as arrays.

    Unknown fields and columns are additive and ignored.
    """

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
    columns: dict[str, Any]
    features: dict[str, list[Any]]
    source: Annotated[Source | None, BeforeValidator(_source)] = None


_RECORD: Final = TypeAdapter(DraftRecord)


def decode_batch(value: bytes) -> EventBatch:
    """Inverse of :func:`encode_batch`; every number in the result is within its range.

    Raises:
        EventRefused: not JSON, another contract or feature schema, columns missing, ragged or of
            the wrong type, or a number out of its range; the record is refused whole.
    """
    try:
        record = _RECORD.validate_python(_parsed(value))
        if _may_hold_booleans(value):  # an array would take them for 1 and 0
            _check_booleans(record)
        return _decoded(record)
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
        return from_json(value)  # NaN and Infinity, which others write, are refused for their range


def _may_hold_booleans(value: bytes) -> bool:
    """Whether the letters of ``true`` or ``false`` are there: a tenth of the time of a search for
    the words, and names alone have them otherwise."""
    text = np.frombuffer(value, np.uint8)
    pairs = ((text[:-1] == a) & (text[1:] == b) for a, b in (b"ru", b"ls"))
    return any(pair.any() for pair in pairs)


def _check_booleans(record: DraftRecord) -> None:
    known = [record.columns.get(name, ()) for name in COLUMNS]
    for column in (*known, *record.features.values()):
        if bool in set(map(type, column)):
            raise EventRefused("draft-event record refused: a boolean is no number")


def _decoded(record: DraftRecord) -> EventBatch:
    numbers, names = dict[str, NDArray[Any]](), dict[str, list[str]]()
    absent = dict[str, float]()
    for field in FIELDS:
        column = record.columns.get(field.name, [])
        if field.optional is not None and column == []:
            absent[field.name] = field.optional
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
    """Refuse a record that is not of this schema, or of no worker."""
    if record.scope == ANY_SCOPE:
        raise EventRefused("draft events of no scope: a worker has one of its own", "range")
    if record.schema_id != SCHEMA_ID:
        if not _types(record.features) <= _FEATURE:
            raise EventRefused("draft events with a feature that is no number")
        raise SchemaUnknown(record.schema_id, SCHEMA_ID)
    if not 0 <= record.sequence <= 2**53:
        raise EventRefused(f"draft-event record of sequence {record.sequence}", "range")
    if record.features.keys() != set(FEATURES):
        raise EventRefused("draft-event record without one column for each feature", "schema")


def _array(field: fields.Field, column: list[Any]) -> NDArray[Any]:
    """``column`` as numbers.

    Raises:
        TypeError, OverflowError: it holds something else.
    """
    code = "q" if field.kind == "integer" else "d"
    if not field.nullable:
        return np.array(array(code, column))
    values = np.array(array(code, [value for value in column if value is not None]))
    if values.min(initial=0) < 0:
        raise EventRefused(f"draft events with a negative {field.name}", "range")
    known = np.full(len(column), -1)
    known[[value is not None for value in column]] = values
    return known


def _features(record: DraftRecord, numbers: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Float32 [n, features], NaN without a draft, where all are null, and only there. Checks
    ``numbers`` as well."""
    drafted = numbers["draft_len"] > 0
    columns = [record.features[name] for name in FEATURES]
    mask, nulls = drafted.tolist(), record.rows - np.count_nonzero(drafted)
    try:
        values = array("d", list(chain.from_iterable(compress(each, mask) for each in columns)))
        if any(each.count(None) != nulls for each in columns):
            raise TypeError("some are of no draft")
    except TypeError as error:
        reason = "range" if _types(record.features) <= _FEATURE else "malformed"
        raise EventRefused(f"draft events with wrong features: {error}", reason) from error
    matrix = np.frombuffer(values).reshape(len(FEATURES), -1).T
    _check(numbers, matrix)
    features = np.full((record.rows, len(FEATURES)), np.nan, np.float32)
    features[drafted] = matrix
    return features


_FEATURE: Final = {int, float, type(None)}


def _types(columns: Mapping[str, list[Any]]) -> set[type]:
    return set(map(type, chain.from_iterable(columns.values())))
