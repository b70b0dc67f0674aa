"""The learner in the loop: its own scope, without broker, registry or waiting.

What a request told comes in when the request is done; a policy that wins the gate is in force from
the next one on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from decoder.contracts.bundle import Policy
from learner.rows import Rows
from learner.scope import Scope
from learner.settings import LearnerSettings

ALL: Final = 1e9
"""Rows a second: recordings run faster than a clock, and every one is learned from."""


@dataclass
class Learning:
    """A scope that learns from a stream, and when it said what; numbers are of requests."""

    scope: Scope
    alarms: list[int] = field(default_factory=list)
    promotions: list[int] = field(default_factory=list)

    @classmethod
    def begun(cls, champion: Policy) -> Learning:
        """A new scope that begins with ``champion``."""
        settings = LearnerSettings(rows_per_second=ALL)
        return cls(Scope("drift", settings, replace(champion, scope="drift", version=1)))

    def told(self, index: int, rows: Rows) -> Policy | None:
        """Take in the drafts of request ``index``; a policy that won. Mutates."""
        if self.scope.feed(rows):
            self.alarms.append(index)
        won = self.scope.candidate()
        if won is None:
            return None
        policy = replace(won.policy, version=self.scope.version + 1)
        self.scope.crown(policy)
        self.promotions.append(index)
        return policy
