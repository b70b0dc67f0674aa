"""History of alias moves, as tags of the registered model, and conditional moves.

MLflow stores where an alias points, not how it came there. Each move has a tag of its own, which is
written without reading, so that a person and the learner cannot overwrite each other's.

A learner moves an alias only from where a learner last put it: a person's move stays. MLflow has no
compare-and-set: a move on MLflow's page between a learner's read and write, a request or two apart,
is lost. Learners never write alias ``pinned``. ``hvd policy`` writes its tag before the alias, so
that a learner always notices it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic_core import from_json

PREFIX: Final = "moved."
MAX_MOVES: Final = 50
"""Of each alias, at two hundred bytes: a model's tags are read every few seconds, and frequent
trials must not displace the champion's history."""
IN_PROGRESS: Final = timedelta(minutes=1)
"""After this, a person's tag without its move was interrupted."""
_FORMAT: Final = "%Y-%m-%dT%H:%M:%S.%fZ"
_MAX_REASON: Final = 1_000  # characters; MLflow accepts 5,000 a tag


@dataclass(frozen=True)
class AliasMove:
    """A move of ``alias`` between versions, None for no version. ``at`` is in UTC."""

    at: datetime
    alias: str
    before: int | None
    after: int | None
    by: str
    why: str


_MOVE: Final = TypeAdapter(AliasMove)


def to_tag(move: AliasMove) -> tuple[str, str]:
    """Key and value of the tag of ``move``; keys sort by time."""
    value = asdict(move) | {"why": move.why[:_MAX_REASON]}
    del value["at"]
    return PREFIX + move.at.astimezone(UTC).strftime(_FORMAT), json.dumps(value)


def moves_in(tags: Mapping[str, str]) -> list[AliasMove]:
    """Moves in ``tags``, oldest first; invalid tags are skipped."""
    moves = (_parse(key, value) for key, value in sorted(tags.items()) if key.startswith(PREFIX))
    return [move for move in moves if move is not None]


def expired_keys(tags: Mapping[str, str]) -> list[str]:
    """Keys of each alias' oldest moves beyond ``MAX_MOVES``."""
    by_alias: dict[str, list[str]] = {}
    for key, value in sorted(tags.items()):
        if key.startswith(PREFIX):
            move = _parse(key, value)
            by_alias.setdefault("" if move is None else move.alias, []).append(key)
    return [key for keys in by_alias.values() for key in keys[:-MAX_MOVES]]


def last_move(tags: Mapping[str, str], alias: str) -> AliasMove | None:
    """The last move of ``alias`` in ``tags``."""
    return next((move for move in reversed(moves_in(tags)) if move.alias == alias), None)


def _parse(key: str, value: str) -> AliasMove | None:
    try:
        at = datetime.strptime(key.removeprefix(PREFIX), _FORMAT).replace(tzinfo=UTC)
        return _MOVE.validate_python({**from_json(value), "at": at})
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True)
class AliasView:
    """The version that an alias names, and its moves in the model's tags."""

    version: int | None
    moves: tuple[AliasMove, ...]

    def announced(self, by: str) -> AliasMove | None:
        """A move in progress by somebody other than ``by``."""
        last = self.moves[-1] if self.moves else None
        if (
            last is None
            or last.by == by
            or last.before != self.version
            or last.after == last.before
        ):
            return None
        return last if datetime.now(UTC) - last.at < IN_PROGRESS else None


def read_alias(client: Any, name: str, alias: str) -> AliasView:
    """Read ``alias`` of model ``name``."""
    model = client.get_registered_model(name)
    version = model.aliases.get(alias)
    moves = tuple(move for move in moves_in(model.tags) if move.alias == alias)
    return AliasView(None if version is None else int(version), moves)


def set_alias(client: Any, name: str, alias: str, version: int | None) -> None:
    """Set the alias, or delete it for None, unconditionally."""
    if version is None:
        client.delete_registered_model_alias(name, alias)
    else:
        client.set_registered_model_alias(name, alias, str(version))


def move_from(
    client: Any, name: str, alias: str, over: int | None, to: int | None, by: str
) -> int | None:
    """Move the alias from ``over`` to ``to``, unless somebody else has moved it or announces so;
    the version that it names afterwards."""
    before = read_alias(client, name, alias)
    announced = before.announced(by)
    if announced is not None:
        return announced.after
    if before.version == to or before.version != over:
        return before.version
    set_alias(client, name, alias, to)
    after = read_alias(client, name, alias)
    theirs = [move for move in after.moves if move not in before.moves and move.by != by]
    if (
        theirs and after.version == to
    ):  # their tag came after our read, their alias before our write
        return move_from(client, name, alias, to, theirs[-1].after, by)
    return after.version
