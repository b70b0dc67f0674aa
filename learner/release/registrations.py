"""Requests to the registrar, their answers, and how aliases move when a comparison ends.

Tags keep who moved what, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from decoder.contracts.bundle import FIRST, Policy
from learner.evaluation.contest import Challenger
from learner.release.registry import Registry, Standing, digest_of
from learner.scope import Scope
from learner.scopes import initial_policy
from learner.settings import LearnerSettings

KEPT: Final = "kept"
"""Origin of a policy that is in force, and no version any more."""
INITIAL: Final = "its first policy"
"""What is registered of a scope without a champion."""
ROLLED_BACK: Final = "rolled back from version"
"""How the reason of a learner's way back begins."""


@dataclass(frozen=True)
class Registration:
    """A policy to be registered, and promoted if it is still ``against`` what it was judged.

    ``against`` is the digest of the champion it won over; "" of a scope's first policy, which is
    promoted where there is no champion. A metric of several values is a curve in MLflow.
    """

    policy: Policy
    against: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    window: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, str]:
        """Scope and what it is. Of these one waits: a later winner takes the place of an earlier
        one, and no winner that of the first policy, which comes back."""
        kind = "the first policy, which comes back" if self.is_return else "a candidate"
        return self.policy.scope, kind if self.against else INITIAL

    @property
    def is_return(self) -> bool:
        """Whether it is the first policy, which comes back at once and is not tried."""
        return self.params.get("learner") == FIRST


@dataclass(frozen=True)
class Settled:
    """What was handed over is ``version`` now, under alias champion or trial; ``refusal`` says why
    not, or "". One that was refused before it was registered has no version."""

    version: int | None
    refusal: str


def registration_of(scope: Scope, won: Challenger, offsets: Mapping[int, int]) -> Registration:
    """What the registry is told of a candidate that won over the champion of ``scope``, when
    records had been read up to ``offsets``."""
    return Registration(
        won.policy,
        against=digest_of(scope.champion),
        params={"learner": won.origin, "champion": scope.version},
        metrics={**won.metrics, **scope.skill_since(won.policy, won.since)},
        tags={"verdict": won.reason, "origin": "learner", **scope.served},
        window={
            **scope.window(),
            "topic": scope.settings.topic.name,
            "offsets": {str(partition): offset for partition, offset in sorted(offsets.items())},
        },
    )


def first_registration(name: str, scope: Scope | None, settings: LearnerSettings) -> Registration:
    """What becomes champion of scope ``name``, which has none: its first policy; or the one in
    force, where somebody deleted its version or took the alias away."""
    policy, origin = initial_policy(name, settings), str(settings.start)
    if scope is not None and scope.version:
        policy, origin = scope.champion, KEPT
    return Registration(policy, tags={"origin": origin, **(scope.served if scope else {})})


LOST: Final = "the lease is lost"
"""Refusal of a move that is the next holder's to make."""


@dataclass(frozen=True)
class Move:
    """In ``scope``: set ``tags`` by version, and move what of the aliases is named.

    ``champion`` goes from ``over`` to ``to``; where ``first`` is given, to the version that it is
    or becomes, and not to ``to``. Alias ``trial`` names ``ended`` no longer.
    """

    scope: str
    by: str
    why: str
    tags: Mapping[int, Mapping[str, str]]
    over: int = 0
    to: int | None = None
    first: Policy | None = None
    ended: int | None = None


@dataclass(frozen=True)
class Moved:
    """``move`` is done, or not done for the reason ``refusal``; ``standing`` is where the aliases
    stand then, None where nobody looked."""

    move: Move
    refusal: str = ""
    standing: Standing | None = None


Answer = Settled | dict[str, Standing] | Policy | Moved
"""A dict is where the aliases of all scopes stand, a policy what was asked for."""


def carry_out(registry: Registry, move: Move) -> Moved:
    """Move the aliases, unless a person has moved the champion or set a pin. Idempotent.

    Aliases come before tags, and each is moved only from where it was seen
    (:mod:`.registry.moves`). Where nothing is moved, tag ``refusal`` of the versions says why.

    Raises:
        RegistryError: MLflow is away, or refuses.
    """
    to = move.to if move.first is None else registry.find(move.first)
    standing = registry.standing(move.scope)
    refusal = ""
    if move.to is not None:
        refusal = operator_override(standing, move.over or None, to or 0)
        if move.first is not None and to is None and not refusal:
            to = registry.register(move.first)  # a new release has brought another
        if to is not None and not refusal and standing.champion != to:
            champion = registry.move_over(
                move.scope, "champion", standing.champion, to, move.by, move.why
            )
            standing = replace(standing, champion=champion)
            refusal = operator_override(standing, to)
    if move.ended is not None and standing.trial == move.ended:
        registry.move_over(move.scope, "trial", move.ended, None, move.by, move.why)
    if refusal:
        for version in {*move.tags, *([] if to is None else [to])}:
            registry.tag(move.scope, version, {"refusal": refusal})
        return Moved(move, refusal, registry.standing(move.scope))
    for version, tags in move.tags.items():
        registry.tag(move.scope, version, tags)
    return Moved(move, standing=registry.standing(move.scope))


def operator_override(standing: Standing, *expected: int | None) -> str:
    """Why a manual alias change blocks the move of a champion that is ``expected``, or ""."""
    champion = standing.champion
    if standing.pinned is not None:
        return f"version {standing.pinned} is pinned"
    if champion in expected:
        return ""
    if champion is None:
        return "the champion was taken away meanwhile"
    return f"version {champion} was made champion meanwhile"
