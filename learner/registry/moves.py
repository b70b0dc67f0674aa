"""Who moved which alias, when, and why: tags of the registered model, one a move.

MLflow keeps where an alias stands and not how it came there. A tag of its own for each move needs
no reading before it is written, so that a person and the learner cannot take each other's away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

PREFIX: Final = "moved."
KEPT: Final = 50
"""Moves kept of an alias, each some two hundred bytes: a model's tags are read every few seconds.
Trials come and go often, and must not take away how the champion came there."""
_FORM: Final = "%Y-%m-%dT%H:%M:%S.%fZ"
_LONGEST: Final = 1_000  # characters of a reason; MLflow takes 5,000 a tag


@dataclass(frozen=True)
class Move:
    """Alias ``alias`` went from one version to another; None where it was not, or is not any
    more. ``at`` is in UTC."""

    at: datetime
    alias: str
    before: int | None
    after: int | None
    by: str
    why: str


def tag_of(move: Move) -> tuple[str, str]:
    """Key and value of the tag that keeps ``move``; keys sort by time."""
    told = asdict(move) | {"why": move.why[:_LONGEST]}
    del told["at"]
    return PREFIX + move.at.astimezone(UTC).strftime(_FORM), json.dumps(told)


def moves_in(tags: Mapping[str, str]) -> list[Move]:
    """The moves kept in ``tags``, oldest first; tags that somebody else wrote are passed over."""
    found = (_read(key, value) for key, value in sorted(tags.items()) if key.startswith(PREFIX))
    return [move for move in found if move is not None]


def spare(tags: Mapping[str, str]) -> list[str]:
    """Keys of each alias' oldest moves, beyond those that are kept."""
    by_alias: dict[str, list[str]] = {}
    for key, value in sorted(tags.items()):
        if key.startswith(PREFIX):
            move = _read(key, value)
            by_alias.setdefault("" if move is None else move.alias, []).append(key)
    return [key for keys in by_alias.values() for key in keys[:-KEPT]]


def last_of(tags: Mapping[str, str], alias: str) -> Move | None:
    """The last move of ``alias`` that ``tags`` keep."""
    return next((move for move in reversed(moves_in(tags)) if move.alias == alias), None)


def champions(tags: Mapping[str, str]) -> set[int]:
    """Versions that were champion, as far as ``tags`` keep the moves."""
    moved = [move for move in moves_in(tags) if move.alias == "champion"]
    return {version for move in moved for version in (move.before, move.after) if version}


def champions_before(tags: Mapping[str, str], champion: int | None) -> set[int]:
    """Versions in whose place ``champion`` came, as far as ``tags`` keep the moves."""
    came = [m for m in moves_in(tags) if m.alias == "champion" and m.after == champion]
    return {move.before for move in came if move.before is not None}


def _read(key: str, value: str) -> Move | None:
    try:
        at = datetime.strptime(key.removeprefix(PREFIX), _FORM).replace(tzinfo=UTC)
        told: dict[str, Any] = json.loads(value)
        return Move(at, **{name: told[name] for name in ("alias", "before", "after", "by", "why")})
    except (ValueError, KeyError, TypeError):
        return None
