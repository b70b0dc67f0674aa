"""Moves of aliases after a comparison, with who moved what and why in the versions' tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from learner.registry import Registry


@dataclass(frozen=True)
class Move:
    """In ``scope``: set ``tags`` by version, then move ``champion`` from ``over`` to ``to``.

    Without ``to`` no alias moves. ``why`` is for the tags of ``to``: see ``Registry.promote``.
    """

    scope: str
    tags: Mapping[int, Mapping[str, str]]
    over: int = 0
    to: int | None = None
    why: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """``move`` is done, or not done for the reason ``refusal``."""

    move: Move
    refusal: str = ""


@dataclass(frozen=True)
class Refused:
    """A candidate that the gate found slower: it becomes a run, and no version."""

    scope: str
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


def carry_out(registry: Registry, move: Move) -> Moved:
    """Do it, unless a person has moved the alias or set a pin; to do it again is harmless.

    Aliases have no compare-and-set, so a move within the next milliseconds is lost; a pin is not.

    Raises:
        RegistryError: MLflow is away, or refuses.
    """
    if move.to is not None:
        standing = registry.standing(move.scope)
        if standing.pinned is not None:
            return Moved(move, f"version {standing.pinned} is pinned")
        if standing.champion not in (move.over, move.to):
            return Moved(move, f"version {standing.champion} was made champion meanwhile")
    for version, tags in move.tags.items():
        registry.tag(move.scope, version, tags)
    if move.to is not None:
        registry.promote(move.scope, move.to, move.why)
    return Moved(move)
