"""JSON Schema (2020-12) of each topic's records, generated from the code that reads them.

Types come from the contracts' models, columns of events from :data:`FIELDS`. Changes must be
compatible with the last release's schemas in ``deploy/schemas/released``; a test checks it.
"""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import TypeAdapter

from decoder.contracts.bundle import ANY_SCOPE, PARAMETERS, Header
from decoder.contracts.errors import EventRefused
from decoder.contracts.events import FEATURE_LIMIT, DraftRecord
from decoder.contracts.features import FEATURES, SCHEMA_ID
from decoder.contracts.fields import FIELDS, LIMITS, Field
from decoder.contracts.status import Status
from decoder.contracts.topics import DEAD, DRAFTS, LEASE, LESSONS, POLICY, STATUS, TRIALS
from decoder.contracts.trials import Round
from learner.ingest.dead_letters import headers_of
from learner.ingest.source import Fetched
from learner.lease import CLAIM

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def files() -> dict[str, str]:
    """Contents of ``deploy/schemas`` by file name."""
    return {
        f"{name}.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for name, schema in _schemas().items()
    }


def _schemas() -> dict[str, Schema]:
    """The schemas by topic name, and that of the feature list by its id."""
    schemas = {
        DRAFTS.name: _drafts(),
        DEAD.name: _dead(),
        LESSONS.name: _lessons(),
        POLICY.name: _policy(),
        STATUS.name: TypeAdapter[Any](Status).json_schema(),
        LEASE.name: CLAIM.json_schema(),
        TRIALS.name: Round.model_json_schema(),
        SCHEMA_ID: _features(),
    }
    # drop the titles that pydantic derives from names, but no property of that name
    untitled = json.loads(
        json.dumps(schemas),
        object_hook=lambda part: {
            key: value for key, value in part.items() if key != "title" or isinstance(value, dict)
        },
    )
    return {
        name: {"$schema": DIALECT, "$id": f"{name}.json", "title": name} | schema
        for name, schema in untitled.items()
    }


def _drafts() -> Schema:
    schema = DraftRecord.model_json_schema() | {
        "description": "A batch of draft events. Each column holds `rows` values; `accepted` is at "
        "most `draft_len`; features are null where, and only where, `draft_len` is 0. What columns "
        "mean: docs/reference/topics.md."
    }
    schema["$defs"] = {"DraftColumns": _columns(), **schema["$defs"]}
    properties = schema["properties"]
    properties["scope"]["not"] = {"const": ANY_SCOPE}
    properties["sequence"] |= dict(zip(("minimum", "maximum"), LIMITS["number"], strict=True))
    properties["rows"]["minimum"] = 1
    properties["columns"] = {"$ref": "#/$defs/DraftColumns"}
    properties["features"]["additionalProperties"] = {"items": _FEATURE, "type": "array"}
    return schema


def _columns() -> Schema:
    """The columns beside the features, from the table of fields."""
    return {
        "description": "Columns of a record. Unknown columns are additive and ignored; one that is "
        "not required is absent from records of earlier releases.",
        "properties": {
            field.name: {
                "description": f"{field.meaning} ({field.unit})" if field.unit else field.meaning,
                "items": _items(field),
                "type": "array",
            }
            for field in FIELDS
        },
        "required": [field.name for field in FIELDS if field.optional is None],
        "type": "object",
    }


def _items(field: Field) -> Schema:
    low, high = field.limits
    if field.words:
        return {"enum": list(field.words), "type": "string"}
    if field.kind == "string":
        return {"maxLength": high, "type": "string"}
    value: Schema = {"type": field.kind, "minimum": low, "maximum": high}
    return {"anyOf": [value, {"type": "null"}]} if field.nullable else value


def _lessons() -> Schema:
    schema = _drafts() | {
        "description": "What is learned from a record of hvd.drafts.v2: those of its rows, and the "
        "source."
    }
    schema["properties"]["source"] = {"$ref": "#/$defs/Source"}
    schema["required"] = [*schema["required"], "source"]
    return schema


_FEATURE: Final[Schema] = {
    "anyOf": [
        {"type": "number", "minimum": -FEATURE_LIMIT, "maximum": FEATURE_LIMIT},
        {"type": "null"},
    ]
}


def _features() -> Schema:
    column = {"type": "array", "items": _FEATURE}
    return {
        "type": "object",
        "properties": dict.fromkeys(FEATURES, column),
        "required": list(FEATURES),
        "additionalProperties": False,
    }


def _policy() -> Schema:
    schema = Header.model_json_schema()
    low, high = PARAMETERS
    for name in ("threshold", "model_payoff"):
        schema["properties"][name] |= {"exclusiveMinimum": low, "exclusiveMaximum": high}
    return schema


def _dead() -> Schema:
    """Headers, which are text."""
    headers = headers_of(Fetched(0, 0, 0, None, b""), EventRefused(""))
    text = {name: {"type": "string"} for name, _ in headers}
    names = {name: {"const": value.decode()} for name, value in DEAD.headers}
    return {"type": "object", "properties": text | names, "required": [name for name, _ in headers]}
