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
"""Moves kept of a model, each some two hundred bytes: its tags are read every few seconds."""
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
    """Keys of the oldest moves, beyond those that are kept."""
    return sorted(key for key in tags if key.startswith(PREFIX))[:-KEPT]


def _read(key: str, value: str) -> Move | None:
    try:
        at = datetime.strptime(key.removeprefix(PREFIX), _FORM).replace(tzinfo=UTC)
        told: dict[str, Any] = json.loads(value)
        return Move(at, **{name: told[name] for name in ("alias", "before", "after", "by", "why")})
    except (ValueError, KeyError, TypeError):
        return None
