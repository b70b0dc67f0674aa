"""What a router has counted since it was made."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from decoder.policy.rule import ARMS

REMEMBERED: Final = 512
"""Steps whose times are kept."""


def _times() -> deque[float]:
    return deque(maxlen=REMEMBERED)


@dataclass
class Counters:
    """Cumulative counts, those of the table among them, and microseconds of the last steps.

    ``own_us`` is all that the router did in a step, and an engine's adapter for it; ``exposed_us``
    what of it the engine waited for; ``choose_us`` what a choice took.
    """

    counts: NDArray[Any]  # of decoder.core.table.COUNTS [1]
    started: int = 0
    stopped: int = 0
    probes: int = 0
    asleep: int = 0  # steps in which no draft was looked for
    left_out: Counter[str] = field(default_factory=Counter)  # requests, by reason
    choose_us: deque[float] = field(default_factory=_times)
    own_us: deque[float] = field(default_factory=_times)
    exposed_us: deque[float] = field(default_factory=_times)

    @property
    def tokens(self) -> int:
        """Committed."""
        return int(self.counts["tokens"][0])

    @property
    def labelled(self) -> int:
        """Cache drafts of which the label is known."""
        return int(self.counts["labelled"][0])

    @property
    def undrafted(self) -> int:
        """Model drafts chosen and not made."""
        return int(self.counts["undrafted"][0])

    @property
    def cycles(self) -> Counter[str]:
        """By arm."""
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
