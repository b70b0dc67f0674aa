"""The plan of a step's drafts, decided once and followed by every rank that runs the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """The drafts of one step, by rows of the batch.

    ``cached`` are the cache drafts; a row without one proposes at most ``limits`` tokens of the
    model's draft. The model drafter makes ``k`` tokens.
    """

    cached: list[list[int]]
    limits: list[int]
    k: int = 0

    @classmethod
    def nothing(cls, rows: int) -> Plan:
        """No drafts."""
        return cls([[] for _ in range(rows)], [0] * rows)

    def spread(self, rows: Sequence[int], size: int) -> Plan:
        """This plan, whose rows are ``rows`` of a batch of ``size``; others draft nothing."""
        if len(rows) == size:
            return self
        plan = Plan.nothing(size)
        cached, limits = list(plan.cached), list(plan.limits)
        for row, tokens, limit in zip(rows, self.cached, self.limits, strict=True):
            cached[row], limits[row] = tokens, limit
        return Plan(cached, limits, self.k)

    def lengths(self) -> list[int]:
        """Length of each row's draft, if the model drafter makes ``k`` tokens."""
        return [
            len(cached) or min(limit, self.k)
            for cached, limit in zip(self.cached, self.limits, strict=True)
        ]

    def proposals(self, from_model: Sequence[list[int]]) -> list[list[int]]:
        """Each row's draft. ``from_model`` are the drafter's, by rows; the last may be missing."""
        rows = [*from_model, *[[]] * (len(self.cached) - len(from_model))]
        return [
            cached or model[:limit]
            for cached, limit, model in zip(self.cached, self.limits, rows, strict=False)
        ]
