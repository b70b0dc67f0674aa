"""Who moved which alias, when, and why: tags of the registered model, one a move.

MLflow keeps where an alias stands and not how it came there. A tag of its own for each move needs
no reading before it is written, so that a person and the learner cannot take each other's away.

A learner's move takes nothing back that a person does meanwhile. MLflow's aliases have no
compare-and-set, so an alias is read before it is written, again and again while the write is under
way -- the first of these reads is sent off before the write and not waited for, so that both travel
together however slow the server is --, and once after it. Where somebody moved it in between, that
is put back, in the same way. What ``hvd policy`` does is a tag as well, written before the alias:
that is found wherever it falls. A move by hand that comes between the last read and the write that
follows it leaves no trace: that is one way through the server's own code, not a request's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
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


def _read(key: str, value: str) -> Move | None:
    try:
        at = datetime.strptime(key.removeprefix(PREFIX), _FORM).replace(tzinfo=UTC)
        return _MOVE.validate_python({**from_json(value), "at": at})
    except (ValueError, TypeError):
        return None


HEAD_START: Final = 0.02
"""Seconds that the read has which is to arrive before the write."""
UNDER_WAY: Final = timedelta(minutes=1)
"""A person's tag without its move is one on its way, and after this one that was cut off."""


@dataclass(frozen=True)
class Look:
    """What an alias names, and the moves of it that the model's tags tell."""

    named: int | None
    told: tuple[Move, ...]

    def announced(self, by: str) -> Move | None:
        """Somebody else's move that is under way."""
        last = self.told[-1] if self.told else None
        if last is None or last.by == by or self.named != last.before or self.named == last.after:
            return None
        return last if datetime.now(UTC) - last.at < UNDER_WAY else None


def look(client: Any, name: str, alias: str) -> Look:
    """At ``alias`` of model ``name``."""
    model = client.get_registered_model(name)
    version = model.aliases.get(alias)
    told = tuple(move for move in moves_in(model.tags) if move.alias == alias)
    return Look(None if version is None else int(version), told)


def write(client: Any, name: str, alias: str, version: int | None) -> None:
    """Let it name ``version``, or nothing, whatever it names."""
    if version is None:
        client.delete_registered_model_alias(name, alias)
    else:
        client.set_registered_model_alias(name, alias, str(version))


def move_over(
    client: Any, name: str, alias: str, over: int | None, to: int | None, by: str
) -> int | None:
    """Let it go from ``over`` to ``to``, unless somebody else moves it.

    Returns:
        What it names then: ``to``, or what somebody else let it name.
    """
    first = look(client, name, alias)
    announced = first.announced(by)
    if announced is not None:
        return announced.after
    if first.named == to or first.named != over:
        return first.named
    looks, failure = _beside(
        lambda: look(client, name, alias), lambda: write(client, name, alias, to)
    )
    last = look(client, name, alias)
    told = [move for move in last.told if move not in first.told and move.by != by]
    theirs = [one.named for one in looks if one.named not in (over, to)]
    theirs += [move.after for move in told]
    if last.named != to or not theirs or theirs[-1] == to:
        if failure is not None and last.named == over:
            raise failure
        return last.named
    stands = move_over(client, name, alias, over=to, to=theirs[-1], by=by)
    if stands == theirs[-1] and not told:
        why = f"moved while {by} moved it to version {to}, and put back"
        kept = Move(datetime.now(UTC), alias, over, stands, "somebody", why)
        client.set_registered_model_tag(name, *tag_of(kept))
    return stands


def _beside(
    read: Callable[[], Look], write: Callable[[], None]
) -> tuple[list[Look], Exception | None]:
    """What was read while it was written, in order, and how the write failed."""
    looks: list[Look] = []
    failure: Exception | None = None
    written = threading.Event()

    def watch() -> None:
        with suppress(Exception):  # what is read after the write is not read here
            while not written.is_set():
                looks.append(read())

    watching = threading.Thread(target=watch, name="hvd-registry-reads", daemon=True)
    watching.start()
    written.wait(HEAD_START)
    try:
        write()
    except Exception as error:  # noqa: BLE001 -- it may have been done all the same
        failure = error
    written.set()
    watching.join()
    return looks, failure
