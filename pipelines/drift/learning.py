"""The learner in the loop: its own scope, without broker, registry or waiting.

What a request told comes in when the request is done; a policy that wins the gate is in force from
the next step on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from decoder.contracts.bundle import Policy
from decoder.contracts.events import DraftEvent
from learner.scope import Scope
from learner.settings import LearnerSettings

NO_LIMIT: Final = 1 << 20
"""Optimiser steps that may be taken at once; as many are taken as drafts have come for."""


@dataclass
class Learning:
    """A scope that learns from a stream, and when it said what; numbers are of requests."""

    scope: Scope
    alarms: list[int] = field(default_factory=list)
    promotions: list[int] = field(default_factory=list)

    @classmethod
    def begun(cls, champion: Policy) -> Learning:
        """A new scope whose champion is ``champion``."""
        scope = Scope("drift", LearnerSettings())
        scope.crown(replace(champion, scope="drift", version=1))
        return cls(scope)

    def told(self, index: int, events: list[DraftEvent]) -> Policy | None:
        """Take in the events of request ``index``; a policy that won. Mutates."""
        scope = self.scope
        rows = scope.admit(events)
        if scope.watch(rows, events[-1].time if events else 0.0):
            self.alarms.append(index)
        scope.learn(NO_LIMIT, seed=scope.buffer.total + scope.updates)
        if not scope.is_due():
            return None
        candidate = scope.propose()
        if not candidate.verdict.promote:
            return None
        policy = replace(candidate.policy, version=scope.version + 1)
        scope.crown(policy)
        self.promotions.append(index)
        return policy
