"""Whether a schema only adds to an earlier one: what reads the one reads the other.

A reader of before must be able to read what is written now, and one of now what was written
before. So a property may be added that need not be there; everything else that changes is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

WORDS: Final = ("$schema", "$id", "$defs", "$comment", "title", "description", "default")
"""Keys that refuse nothing. What ``$defs`` hold is compared where it is referred to."""
BOUNDS: Final = {
    "minimum": 1, "exclusiveMinimum": 1, "minLength": 1, "minItems": 1,
    "maximum": -1, "exclusiveMaximum": -1, "maxLength": -1, "maxItems": -1,
}  # fmt: skip
"""Keys that bound something, and which way is narrower."""
INNER: Final = ("items", "additionalProperties", "propertyNames", "not")
ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf", "prefixItems")


def breaks(before: Schema, now: Schema) -> list[str]:
    """What of ``now`` is no addition to ``before``, a sentence each; schemas that do not recur."""
    return list(_compared(_resolved(before, before), _resolved(now, now), "record"))


def _resolved(part: Any, whole: Schema) -> Any:
    """``part`` with what its references lead to in their place."""
    if isinstance(part, list):
        return [_resolved(each, whole) for each in part]
    if not isinstance(part, Mapping):
        return part
    target = part.get("$ref", "")
    if isinstance(target, str) and target.startswith("#/$defs/"):
        return _resolved(whole["$defs"][target.removeprefix("#/$defs/")], whole)
    return {key: _resolved(value, whole) for key, value in part.items() if key != "$defs"}


def _compared(before: Any, now: Any, where: str) -> Iterator[str]:
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        if before != now:
            yield f"{where}: {before} became {now}"
        return
    yield from _properties(before, now, where)
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if key in (*WORDS, "properties", "required", "discriminator") or old == new:
            continue
        if key in BOUNDS:
            yield f"{where}: {key} was {_narrower(key, old, new)}, from {old} to {new}"
        elif key in INNER and old is not None and new is not None:
            yield from _compared(old, new, f"{where}.{key}")
        elif key == "patternProperties" and old and new and old.keys() == new.keys():
            for name in old:
                yield from _compared(old[name], new[name], f"{where}.{name}")
        elif key in ALTERNATIVES and old and new and len(old) == len(new):
            for number, pair in enumerate(zip(old, new, strict=True)):
                yield from _compared(*pair, f"{where}.{key}[{number}]")
        else:
            yield f"{where}: {key} went from {old} to {new}"


def _properties(before: Schema, now: Schema, where: str) -> Iterator[str]:
    old, new = before.get("properties", {}), now.get("properties", {})
    for name in old:
        if name in new:
            yield from _compared(old[name], new[name], f"{where}.{name}")
        else:
            yield f"{where}: {name} is gone, or has another name"
    needed, needs = set(before.get("required", ())), set(now.get("required", ()))
    for name in sorted(needs - needed):
        yield f"{where}: {name} must be there now, and records of before have none"
    for name in sorted(needed - needs):
        yield f"{where}: {name} need no longer be there, and readers of before count on it"


def _narrower(key: str, old: float | None, new: float | None) -> str:
    if old is None:
        return "narrowed"
    if new is None:
        return "widened"
    return "narrowed" if (new - old) * BOUNDS[key] > 0 else "widened"
