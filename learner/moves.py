"""Moves of aliases before and after a comparison, with who moved what and why in tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from decoder.contracts.bundle import Policy
from learner.registry import Registry, Standing
from learner.registry.moves import last_of

LOST: Final = "the lease is lost"
"""Refusal of a move that is the next holder's to make."""


@dataclass(frozen=True)
class Move:
    """In ``scope``: set ``tags`` by version, and move what of the aliases is named.

    ``champion`` goes from ``over`` to ``to``. Alias ``trial`` names ``begun`` from now on, and
    ``ended`` no longer. Where ``first`` is given, the champion goes to the version that
    it is or becomes, and not to ``to``.
    """

    scope: str
    by: str
    why: str
    tags: Mapping[int, Mapping[str, str]]
    over: int = 0
    to: int | None = None
    first: Policy | None = None
    begun: int | None = None
    ended: int | None = None


@dataclass(frozen=True)
class Moved:
    """``move`` is done, or not done for the reason ``refusal``; ``standing`` is where the aliases
    stand then, None where nobody looked."""

    move: Move
    refusal: str = ""
    standing: Standing | None = None


def carry_out(registry: Registry, move: Move) -> Moved:
    """Do it, unless a person has moved the champion, put a version on trial, or set a pin; to do it
    again is harmless.

    Aliases first, and each only from where it was seen (:mod:`learner.registry.fence`). What is not
    done says so in tag ``refusal`` of its versions.

    Raises:
        RegistryError: MLflow is away, or refuses.
    """
    to = move.to if move.first is None else registry.find(move.first)
    standing = registry.standing(move.scope)
    if move.to is not None:
        refusal = _refusal(move, to, standing)
        if move.first is not None and to is None and not refusal:
            to = registry.register(move.first)  # a new release has brought another
        if to is not None and not refusal and standing.champion != to:
            champion = registry.move_over(
                move.scope, "champion", standing.champion, to, move.by, move.why
            )
            standing = replace(standing, champion=champion)
            refusal = "" if champion == to else _meanwhile(champion)
        if refusal:
            for version in {*move.tags, *([] if to is None else [to])}:
                registry.tag(move.scope, version, {"refusal": refusal})
            return Moved(move, refusal, standing)
    if move.begun is not None and standing.trial != move.begun and _is_free(standing, move.by):
        registry.move_over(move.scope, "trial", standing.trial, move.begun, move.by, move.why)
    if move.ended is not None and standing.trial == move.ended:
        registry.move_over(move.scope, "trial", move.ended, None, move.by, move.why)
    standing = registry.standing(move.scope)
    if to is not None and _is_moved_by(standing, "champion", to, move.by):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        registry.tag(move.scope, to, {"moved_at": at, "moved_by": move.by, "why": move.why})
    for version, tags in move.tags.items():
        registry.tag(move.scope, version, tags)
    return Moved(move, standing=standing)


def _refusal(move: Move, to: int | None, standing: Standing) -> str:
    if standing.pinned is not None:
        return f"version {standing.pinned} is pinned"
    return (
        "" if standing.champion in (move.over or None, to or 0) else _meanwhile(standing.champion)
    )


def _meanwhile(champion: int | None) -> str:
    if champion is None:
        return "the champion was taken away meanwhile"
    return f"version {champion} was made champion meanwhile"


def _is_free(standing: Standing, by: str) -> bool:
    """Whether alias ``trial`` is nobody's word: it names nothing, or what ``by`` let it name."""
    if standing.pinned is not None:
        return False
    return standing.trial is None or _is_moved_by(standing, "trial", standing.trial, by)


def _is_moved_by(standing: Standing, alias: str, version: int, by: str) -> bool:
    last = last_of(standing.tags, alias)
    return last is not None and (last.after, last.by) == (version, by)
