"""Decoding cycles as columns, and what they come to under a cost table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import MODEL

Ints = NDArray[np.int32]


class Cycle(NamedTuple):
    """One cycle of recording ``trace``; lengths in tokens.

    The first token of an output comes with the prompt and belongs to no cycle.
    """

    trace: int
    position: int  # output tokens committed before
    arm: int  # of ``decoder.policy.rule``
    verified: int  # draft tokens
    accepted: int  # draft tokens committed
    committed: int  # tokens

    @property
    def drafted(self) -> int:
        """Tokens that the model drafter made."""
        return self.verified if self.arm == MODEL else 0


@dataclass(frozen=True)
class Cycles:
    """Cycles, a row each, by recording and position: the columns of :class:`Cycle`."""

    trace: Ints
    position: Ints
    arm: Ints
    verified: Ints
    accepted: Ints
    committed: Ints

    @classmethod
    def of(cls, cycles: Iterable[Cycle]) -> Cycles:
        """``cycles`` as columns."""
        return cls(*np.array(list(cycles), np.int32).reshape(-1, len(Cycle._fields)).T)

    @property
    def drafted(self) -> Ints:
        """Tokens that the model drafter made [n]."""
        return np.where(self.arm == MODEL, self.verified, 0).astype(np.int32)

    def times(self, costs: CostTable) -> NDArray[np.float64]:
        """Time of each cycle, run alone: float64 [n]."""
        most = int(self.drafted.max(initial=0))
        drafting = np.array([costs.drafting(k, 1) for k in range(most + 1)])
        found: NDArray[np.float64] = costs.verifying(1 + self.verified) + drafting[self.drafted]
        return found

    def rate(self) -> float:
        """Tokens committed in the time of a plain step, run one request at a time."""
        return float(self.committed.sum() / self.times(NOMINAL).sum())
