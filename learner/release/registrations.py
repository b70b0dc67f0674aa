"""Requests to the registrar and their results, and alias moves at the end of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from decoder.contracts.bundle import FIRST, Policy
from learner.evaluation.challengers import Challenger
from learner.release.registry import AliasState, Registry, digest_of
from learner.scope import Scope
from learner.scopes import initial_policy
from learner.settings import LearnerSettings

RECOVERED: Final = "kept"  # origin of a policy that is in force here, but missing in the registry
INITIAL: Final = "its first policy"
CANDIDATE: Final = "a candidate"
RETURN: Final = "the first policy, which comes back"  # kinds of registrations
ROLLED_BACK: Final = "rolled back from version"  # prefix of the reason of a learner's roll-back
LEASE_LOST: Final = "the lease is lost"  # refusal of a move that the next holder must make


@dataclass(frozen=True)
class Registration:
    """A policy to register, and to promote if the champion is still the one it was judged against.

    ``against`` is that champion's digest; "" for a scope's initial policy, which is promoted if
    there is no champion. A metric of several values is a curve in MLflow.
    """

    policy: Policy
    against: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    window: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """Scope and kind, of which one registration is pending: a later candidate replaces an
        earlier one, but not a return of the first policy."""
        kind = RETURN if self.is_return else CANDIDATE
        return self.policy.scope, kind if self.against else INITIAL

    @property
    def is_return(self) -> bool:
        """Whether the first policy comes back, without a trial."""
        return self.params.get("learner") == FIRST


@dataclass(frozen=True)
class Registered:
    """Result of a registration: ``version`` is champion or on trial, unless there is a ``refusal``;
    None if it was refused before."""

    version: int | None
    refusal: str


def registration_of(
    scope: Scope, candidate: Challenger, offsets: Mapping[int, int]
) -> Registration:
    """The registration of a candidate; ``offsets`` are the next records to read by partition."""
    return Registration(
        candidate.policy,
        against=digest_of(scope.champion),
        params={"learner": candidate.origin, "champion": scope.version},
        metrics={**candidate.metrics, **scope.skill_since(candidate.policy, candidate.since)},
        tags={"verdict": candidate.reason, "origin": "learner", **scope.served},
        window={
            **scope.window(),
            "topic": scope.settings.topic.name,
            "offsets": {str(partition): offset for partition, offset in sorted(offsets.items())},
        },
    )


def first_registration(name: str, scope: Scope | None, settings: LearnerSettings) -> Registration:
    """The registration of the policy for scope ``name`` without a champion: the initial one, or
    that in force, whose version or alias somebody deleted."""
    policy, origin = initial_policy(name, settings), str(settings.start)
    if scope is not None and scope.version:
        policy, origin = scope.champion, RECOVERED
    return Registration(policy, tags={"origin": origin, **(scope.served if scope else {})})


@dataclass(frozen=True)
class MoveRequest:
    """In ``scope``, set ``tags`` by version, and move aliases.

    ``champion`` moves from ``over`` to ``to``, or to the version of ``first`` if given. Alias
    ``trial`` is removed from version ``ended``.
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
class MoveResult:
    """``request`` was carried out, or not for the reason ``refusal``; ``aliases`` afterwards, None
    if unknown."""

    request: MoveRequest
    refusal: str = ""
    aliases: AliasState | None = None


Answer = Registered | dict[str, AliasState] | Policy | MoveResult
"""A dict holds the aliases of all scopes; a policy was requested."""


def move_aliases(registry: Registry, request: MoveRequest) -> MoveResult:
    """Move aliases, unless a person has moved the champion or set a pin. Idempotent.

    Aliases are moved before tags are set, and only from where they were seen
    (:mod:`.registry.moves`). After a refusal, tag ``refusal`` of the versions holds the reason.

    Raises:
        RegistryError: MLflow is away, or refuses.
    """
    scope, by, why = request.scope, request.by, request.why
    to = request.to if request.first is None else registry.find(request.first)
    aliases = registry.alias_state(scope)
    refusal = ""
    if request.to is not None:
        refusal = operator_override(aliases, request.over or None, to or 0)
        if request.first is not None and to is None and not refusal:
            to = registry.register(request.first)  # of a new release
        if to is not None and not refusal and aliases.champion != to:
            champion = registry.move_from(scope, "champion", aliases.champion, to, by, why)
            aliases = replace(aliases, champion=champion)
            refusal = operator_override(aliases, to)
    if request.ended is not None and aliases.trial == request.ended:
        registry.move_from(scope, "trial", request.ended, None, by, why)
    tags = request.tags
    if refusal:
        versions = {*request.tags, *([] if to is None else [to])}
        tags = {version: {"refusal": refusal} for version in versions}
    for version, values in tags.items():
        registry.tag(scope, version, values)
    return MoveResult(request, refusal, registry.alias_state(scope))


def operator_override(aliases: AliasState, *expected: int | None) -> str:
    """Why a manual alias change blocks a promotion over an ``expected`` champion, or ""."""
    champion = aliases.champion
    if aliases.pinned is not None:
        return f"version {aliases.pinned} is pinned"
    if champion in expected:
        return ""
    if champion is None:
        return "the champion was taken away meanwhile"
    return f"version {champion} was made champion meanwhile"
