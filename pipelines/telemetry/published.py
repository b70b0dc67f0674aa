"""The folder of schemas as it is published: what the code says now, and what the last release said.

What is said now may only add to that: a reader of before reads what is written now, and one of now
what was written before. A property may come that need not be there, and no more. An id of features
stays where it is when the code has another list: events of before name it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import ContractError
from pipelines.telemetry.schemas import PAGE, schemas

RELEASED: Final = "released"
WORDS: Final = ("$schema", "$id", "$comment", "title", "description", "default", "discriminator")
"""Keys that refuse nothing."""


def files() -> dict[str, str]:
    """Text by name of file.

    Raises:
        ContractError: this is no checkout, which has the page that says what columns mean.
    """
    if not PAGE.is_file():
        raise ContractError(f"schemas are made in a checkout: there is no {PAGE}.")
    return {
        f"{name}.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for name, schema in schemas(PAGE.read_text(encoding="utf-8")).items()
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
