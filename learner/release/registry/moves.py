"""Who moved which alias, when, and why: tags of the registered model, one a move.

MLflow keeps where an alias stands and not how it came there. A tag of its own for each move needs
no reading before it is written, so that a person and the learner cannot take each other's away.

A learner moves an alias only from where it expects it, which is where a learner last put it: an
alias that names anything else was moved by a person, and stays. MLflow has no compare-and-set, so a
move on MLflow's page that falls between a learner's read and its write, a request or two apart, is
lost; alias ``pinned`` no learner writes. ``hvd policy`` writes its tag before the alias, so that a
learner finds that move wherever it falls.
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


_MOVE: Final = TypeAdapter(Move)


def tag_of(move: Move) -> tuple[str, str]:
    """Key and value of the tag that keeps ``move``; keys sort by time."""
    value = asdict(move) | {"why": move.why[:_LONGEST]}
    del value["at"]
    return PREFIX + move.at.astimezone(UTC).strftime(_FORM), json.dumps(value)


def moves_in(tags: Mapping[str, str]) -> list[Move]:
    """The moves kept in ``tags``, oldest first; tags that somebody else wrote are passed over."""
    read = (_read(key, value) for key, value in sorted(tags.items()) if key.startswith(PREFIX))
    return [move for move in read if move is not None]


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


def _read(key: str, value: str) -> Move | None:
    try:
        at = datetime.strptime(key.removeprefix(PREFIX), _FORM).replace(tzinfo=UTC)
        return _MOVE.validate_python({**from_json(value), "at": at})
    except (ValueError, TypeError):
        return None


UNDER_WAY: Final = timedelta(minutes=1)
"""A person's tag without its move is one on its way, and after this one that was cut off."""


@dataclass(frozen=True)
class Look:
    """What an alias names, and the moves of it that the model's tags tell."""

    named: int | None
    moves: tuple[Move, ...]

    def announced(self, by: str) -> Move | None:
        """Somebody else's move that is under way."""
        last = self.moves[-1] if self.moves else None
        if last is None or last.by == by or self.named != last.before or self.named == last.after:
            return None
        return last if datetime.now(UTC) - last.at < UNDER_WAY else None


def look(client: Any, name: str, alias: str) -> Look:
    """At ``alias`` of model ``name``."""
    model = client.get_registered_model(name)
    version = model.aliases.get(alias)
    moves = tuple(move for move in moves_in(model.tags) if move.alias == alias)
    return Look(None if version is None else int(version), moves)


def write(client: Any, name: str, alias: str, version: int | None) -> None:
    """Let it name ``version``, or nothing, whatever it names."""
    if version is None:
        client.delete_registered_model_alias(name, alias)
    else:
        client.set_registered_model_alias(name, alias, str(version))


def move_over(
    client: Any, name: str, alias: str, over: int | None, to: int | None, by: str
) -> int | None:
    """Move it from ``over`` to ``to``, unless somebody else has moved it or announces so.

    Returns:
        What it names then: ``to``, or what somebody else let it name.
    """
    before = look(client, name, alias)
    announced = before.announced(by)
    if announced is not None:
        return announced.after
    if before.named == to or before.named != over:
        return before.named
    write(client, name, alias, to)
    after = look(client, name, alias)
    theirs = [move for move in after.moves if move not in before.moves and move.by != by]
    if theirs and after.named == to:  # its tag came after our read, its alias before our write
        return move_over(client, name, alias, to, theirs[-1].after, by)
    return after.named
