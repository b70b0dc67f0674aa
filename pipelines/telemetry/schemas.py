"""JSON Schema (2020-12) of what each topic carries, made of the code that reads it.

Types come from the contracts' models, ranges of events from their own table, and what a column
means from the page that analysts read, ``docs/telemetry.md``: the files are made in a checkout.

What is said now may only add to what the last release said: a reader of before reads what is
written now, and one of now what was written before. A property may come that need not be there, and
no more. An id of features stays where it is when the code has another list: events of before name
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from decoder.contracts.bundle import ANY_SCOPE, PARAMETERS, Header
from decoder.contracts.errors import ContractError, EventRefused
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
RELEASED: Final = "released"
WORDS: Final = ("$schema", "$id", "$comment", "title", "description", "default", "discriminator")
"""Keys that refuse nothing."""

Schema = dict[str, Any]


def files() -> dict[str, str]:
    """Text by name of file.

    Raises:
        ContractError: this is no checkout, which has the page that says what columns mean.
    """
    if not PAGE.is_file():
        raise ContractError(f"schemas are made in a checkout: there is no {PAGE}.")
    return {
        f"{name}.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for name, schema in _schemas(PAGE.read_text(encoding="utf-8")).items()
    }


def publish(folder: Path, release: bool = False) -> list[Path]:
    """Write the files into ``folder``, of a ``release`` also as what later ones may only add to.

    Raises:
        ContractError: something was changed that is no addition; nothing is written.
    """
    made = files()
    found = broken(folder, made)
    if found:
        raise ContractError("no addition, so a new version of the topic: " + "; ".join(found))
    parts = (folder, folder / RELEASED) if release else (folder,)
    paths = [part / name for part in parts for name in made]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made[path.name], encoding="utf-8")
    return paths


def broken(folder: Path, now: Mapping[str, str]) -> list[str]:
    """Where ``now`` does more than add to what was released under ``folder``, a sentence each."""
    found = []
    for path in sorted((folder / RELEASED).glob("*.json")):
        kept, before = folder / path.name, json.loads(path.read_text(encoding="utf-8"))
        if path.name not in now and not kept.is_file():
            found.append(f"{path.name}: nothing keeps it any more")
        else:
            text = now.get(path.name) or kept.read_text(encoding="utf-8")  # of features of before
            found += [f"{path.name}: {what}" for what in breaks(before, json.loads(text))]
    return found


def breaks(before: Any, now: Any) -> list[str]:
    """What of the schema ``now`` is no addition to ``before``, a sentence each. None may recur."""
    return list(_compared(_resolved(before, before), _resolved(now, now), "record"))


def _resolved(part: Any, whole: Mapping[str, Any]) -> Any:
    """``part`` with what its references lead to in their place."""
    if isinstance(part, list):
        return [_resolved(each, whole) for each in part]
    if not isinstance(part, dict):
        return part
    target = part.get("$ref", "")
    if isinstance(target, str) and target.startswith("#/$defs/"):
        return _resolved(whole["$defs"][target.removeprefix("#/$defs/")], whole)
    return {key: _resolved(value, whole) for key, value in part.items() if key != "$defs"}


def _compared(old: Any, new: Any, where: str, named: bool = False) -> Iterator[str]:
    """``named``: the keys are names of properties, which may come, and no words of JSON Schema."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from _compared(*pair, f"{where}[{number}]")
    elif not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield f"{where} went from {old} to {new}"
    else:
        for key in old if named else old | new:
            was, is_ = old.get(key), new.get(key)
            if named and is_ is None:
                yield f"{where}: {key} is gone, or has another name"
            elif key == "required" and not named:
                for name in sorted({*(was or ())} ^ {*(is_ or ())}):
                    what = "must be there now" if name in (is_ or ()) else "need no longer be there"
                    yield f"{where}: {name} {what}"
            elif named or key not in WORDS:
                is_table = key == "properties" and not named
                yield from _compared(was, is_, where if is_table else f"{where}.{key}", is_table)


def _schemas(page: str) -> dict[str, Schema]:
    """The schemas by name: a topic's, or the id of the list of features."""
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
