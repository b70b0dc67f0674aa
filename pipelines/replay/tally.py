"""Decoding cycles as columns, and what they come to under a cost table."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE


@dataclass(frozen=True)
class Cycles:
    """Simulated cycles, one row each, by recording and position; lengths in tokens.

    The first token of an output comes with the prompt and belongs to no cycle.
    """

    trace: NDArray[np.int32]  # [n]
    position: NDArray[np.int32]  # [n], output tokens committed before
    arm: NDArray[np.int8]  # [n], of ``decoder.policy.rule``
    verified: NDArray[np.int32]  # [n], draft tokens
    accepted: NDArray[np.int32]  # [n], draft tokens committed
    committed: NDArray[np.int32]  # [n], tokens
    tail: NDArray[np.int32]  # [n], of the verified ones, those behind a model draft

    @property
    def drafted(self) -> NDArray[np.int32]:
        """Tokens that the model drafter made [n]."""
        return np.where(self.arm == MODEL, self.verified - self.tail, 0).astype(np.int32)

    def before(self, recording: int) -> Cycles:
        """Those of the first so many recordings."""
        mine = self.trace < recording
        return Cycles(*(getattr(self, f.name)[mine] for f in fields(self)))

    def tally(self, costs: CostTable = NOMINAL) -> Tally:
        """Counts, and the time of cycles run one request at a time."""
        time = costs.dense[1 + self.verified].sum()
        for k, n in zip(*np.unique(self.drafted, return_counts=True), strict=True):
            time += costs.drafting(int(k), 1) * n
        by_arm = np.bincount(self.arm, minlength=len(ARMS))
        accepted = np.bincount(self.arm, self.accepted, len(ARMS))
        return Tally(
            len(self.arm),
            int(self.committed.sum()),
            float(time),
            (int(by_arm[NONE]), int(by_arm[MODEL]), int(by_arm[CACHE])),
            (int(accepted[NONE]), int(accepted[MODEL]), int(accepted[CACHE])),
        )


@dataclass(frozen=True)
class Tally:
    """What a way of decoding did. ``time`` has the cost table's unit, a plain step if nominal."""

    cycles: int
    committed: int
    time: float
    by_arm: tuple[int, int, int]  # cycles of arms none, model, cache
    accepted: tuple[int, int, int]  # draft tokens accepted by arm

    @property
    def rate(self) -> float:
        """Tokens committed in a unit of time."""
        return self.committed / self.time if self.time else 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.cycles + other.cycles,
            self.committed + other.committed,
            self.time + other.time,
            _sum(self.by_arm, other.by_arm),
            _sum(self.accepted, other.accepted),
        )


def _sum(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


NOTHING: Final = Tally(0, 0, 0.0, (0, 0, 0), (0, 0, 0))
