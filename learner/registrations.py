"""What is handed to the registrar, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from decoder.contracts.bundle import Policy
from learner.moves import Moved
from learner.registry import Standing, digest_of
from learner.scope import Candidate, Scope

KEPT: Final = "kept"
"""Origin of a policy that is in force, and no version any more."""
ROLLED_BACK: Final = "rolled back from version"
"""How the reason of a learner's way back begins."""


@dataclass(frozen=True)
class Registration:
    """A policy to be registered, and promoted if it is still ``against`` what it was judged.

    ``against`` is the digest of the champion it won over; "" of a scope's first policy, which is
    promoted where there is no champion.
    """

    policy: Policy
    against: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    window: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, bool]:
        """Of these one waits: a later winner takes the place of an earlier one."""
        return self.policy.scope, bool(self.against)


@dataclass(frozen=True)
class Settled:
    """``registration`` is ``version`` now, under alias champion or trial; ``refusal`` says why not,
    or "". One that was refused before it was registered has no version."""

    registration: Registration
    version: int | None
    refusal: str


@dataclass(frozen=True)
class Seen:
    """Where the aliases of all scopes stand."""

    standings: Mapping[str, Standing]


@dataclass(frozen=True)
class Loaded:
    """A policy that was asked for."""

    policy: Policy


Answer = Settled | Seen | Loaded | Moved


@dataclass(frozen=True)
class Rules:
    """How a learner deals with versions: the name it signs its moves with, whether winners go on
    ``trial`` first, and how many versions of a scope it keeps."""

    by: str = "learner"
    trial: bool = False
    keep: int = 20


def registration_of(scope: Scope, won: Candidate, offsets: Mapping[int, int]) -> Registration:
    """What the registry is told of a candidate that won over the champion of ``scope``, when
    records had been read up to ``offsets``."""
    return Registration(
        won.policy,
        against=digest_of(scope.champion),
        params={"learner": won.origin, "champion": scope.version},
        metrics=won.verdict.metrics(),
        tags={"verdict": won.verdict.reason, "origin": "learner", **scope.served},
        window={
            **scope.window(),
            "topic": scope.settings.topic.name,
            "offsets": {str(partition): offset for partition, offset in sorted(offsets.items())},
        },
    )
