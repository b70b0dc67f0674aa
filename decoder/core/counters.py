"""Counters of a router since its creation."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from decoder.policy.rule import ARMS

WINDOW_STEPS: Final = 512
"""Steps whose times are kept."""


def _times() -> deque[float]:
    return deque(maxlen=WINDOW_STEPS)


@dataclass
class Counters:
    """Cumulative counts, including those of the table, and microseconds of the last steps.

    ``own_us`` is the time of the router and the engine's adapter in a step; ``exposed_us`` the part
    of it that the engine waited for; ``choose_us`` the time of a choice.
    """

    counts: NDArray[Any]  # of decoder.core.table.COUNTS [1]
    started: int = 0
    stopped: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # requests, by reason
    choose_us: deque[float] = field(default_factory=_times)
    own_us: deque[float] = field(default_factory=_times)
    exposed_us: deque[float] = field(default_factory=_times)

    @property
    def tokens(self) -> int:
        """Tokens committed."""
        return int(self.counts["tokens"][0])

    @property
    def labelled(self) -> int:
        """Cache drafts with a resolved label."""
        return int(self.counts["labelled"][0])

    @property
    def undrafted(self) -> int:
        """Model drafts chosen but not made."""
        return int(self.counts["undrafted"][0])

    @property
    def cycles(self) -> Counter[str]:
        """Cycles, by arm."""
        return self._by_arm("cycles")

    @property
    def drafted(self) -> Counter[str]:
        """Draft tokens verified, by arm."""
        return self._by_arm("drafted")

    @property
    def accepted(self) -> Counter[str]:
        """Draft tokens accepted, by arm."""
        return self._by_arm("accepted")

    def _by_arm(self, what: str) -> Counter[str]:
        return +Counter(dict(zip(ARMS, self.counts["arms"][0][what].tolist(), strict=True)))
