"""JSON Schema (2020-12) of what each topic carries, made of the code that reads it.

Types come from the contracts' models, ranges of events from their own table, and what a column
means from the page that analysts read, ``docs/telemetry.md``: the files are made in a checkout.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from decoder.contracts.bundle import ANY_SCOPE, PARAMETERS, Header
from decoder.contracts.errors import EventRefused
from decoder.contracts.events import FEATURE_LIMIT, LIMITS, DraftRecord
from decoder.contracts.features import FEATURES, SCHEMA_ID
from decoder.contracts.status import Status
from decoder.contracts.topics import DEAD, DRAFTS, LEASE, POLICY, STATUS, TRIALS
from decoder.contracts.trials import Round
from learner.dead_letters import headers_of
from learner.lease import CLAIM
from learner.source import Fetched

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
PAGE: Final = Path(__file__).parents[2] / "docs" / "telemetry.md"

Schema = dict[str, Any]


def schemas(page: str) -> dict[str, Schema]:
    """The schemas by name: a topic's, or the id of the list of features.

    Args:
        page: the text of ``docs/telemetry.md``, which says what columns mean.
    """
    made = {
        DRAFTS.name: _drafts(page),
        DEAD.name: _dead(),
        POLICY.name: _policy(),
        STATUS.name: TypeAdapter[Any](Status).json_schema(),
        LEASE.name: CLAIM.json_schema(),
        TRIALS.name: Round.model_json_schema(),
        SCHEMA_ID: _features(),
    }
    # without the titles that pydantic makes of names: a property of that name is no text
    untitled = json.loads(
        json.dumps(made),
        object_hook=lambda part: {
            key: value for key, value in part.items() if key != "title" or isinstance(value, dict)
        },
    )
    return {
        name: {"$schema": DIALECT, "$id": f"{name}.json", "title": name} | schema
        for name, schema in untitled.items()
    }


def _drafts(page: str) -> Schema:
    schema = DraftRecord.model_json_schema() | {
        "description": "A batch of draft events. Each column holds `rows` values; `accepted` is at "
        "most `draft_len`; features are null where, and only where, `draft_len` is 0."
    }
    columns = schema["$defs"]["DraftColumns"]["properties"]
    for name, (low, high) in LIMITS.items():
        columns[name]["items"] |= {"minimum": low, "maximum": high}
    _, model = LIMITS["accepted"]
    columns["model_accepted"]["items"]["anyOf"][0] |= {"minimum": 0, "maximum": model}
    for name, unit, _, meaning in _rows(page, "Columns"):
        said = f"{meaning} ({unit})" if unit else meaning
        columns[name] |= {"description": said.replace("`", "")}
    fields = schema["properties"]
    for name, meaning in _rows(page, "A record of `hvd.drafts.v2`"):
        fields.get(name, {})["description"] = meaning.replace("`", "")
    fields["scope"]["not"] = {"const": ANY_SCOPE}
    fields["sequence"] |= dict(zip(("minimum", "maximum"), LIMITS["number"], strict=True))
    fields["rows"]["minimum"] = 1
    fields["features"]["additionalProperties"]["items"] = _FEATURE
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
    schema["properties"]["share"] |= {"minimum": 0, "maximum": 1}
    return schema


def _dead() -> Schema:
    """Of headers, which are text."""
    told = headers_of(Fetched(0, 0, 0, None, b""), EventRefused(""))
    text = {name: {"type": "string"} for name, _ in told}
    names = {name: {"const": value.decode()} for name, value in DEAD.headers}
    return {"type": "object", "properties": text | names, "required": [name for name, _ in told]}


def _rows(page: str, title: str) -> list[tuple[str, ...]]:
    """Rows of the table under ``title`` that begin with one name, or several as rows each."""
    _, _, after = page.partition(f"## {title}\n")
    found = []
    for line in after.partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            first, *rest = (cell.strip() for cell in line.split("|")[1:-1])
            found += [(name, *rest) for name in re.findall(r"`(\w+)`", first)]
    return found
