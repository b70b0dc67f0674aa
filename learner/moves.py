"""Moves of aliases before and after a comparison, with who moved what and why in tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.registry import Registry, charts


@dataclass(frozen=True)
class Move:
    """In ``scope``: set ``tags`` by version, and move what of the aliases is named.

    ``champion`` goes from ``over`` to ``to``. Alias ``trial`` names ``begun`` from now on, and
    ``ended`` no longer. ``points`` are of a comparison over time, as ``charts.trial`` draws them,
    for the version that has tags.
    """

    scope: str
    by: str
    why: str
    tags: Mapping[int, Mapping[str, str]]
    over: int = 0
    to: int | None = None
    begun: int | None = None
    ended: int | None = None
    points: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Moved:
    """``move`` is done, or not done for the reason ``refusal``."""

    move: Move
    refusal: str = ""


def carry_out(registry: Registry, move: Move) -> Moved:
    """Do it, unless a person has moved the champion or set a pin; to do it again is harmless.

    Aliases have no compare-and-set, so a move within the next milliseconds is lost; a pin is not.

    Raises:
        RegistryError: MLflow is away, or refuses.
    """
    standing = registry.standing(move.scope)
    if move.to is not None:
        if standing.pinned is not None:
            return Moved(move, f"version {standing.pinned} is pinned")
        if standing.champion not in (move.over, move.to):
            return Moved(move, f"version {standing.champion} was made champion meanwhile")
    for version, tags in move.tags.items():
        registry.tag(move.scope, version, tags)
        if move.points:
            registry.attach(move.scope, version, {"trial.png": charts.trial(move.points)})
    if move.to is not None and standing.champion != move.to:
        registry.promote(move.scope, move.to, {"moved_by": move.by, "why": move.why})
    if move.begun is not None and standing.trial != move.begun:
        registry.move(move.scope, "trial", move.begun, move.by, move.why)
    if move.ended is not None and standing.trial == move.ended:
        registry.move(move.scope, "trial", None, move.by, move.why)
    return Moved(move)
