"""Counters of a router since its creation."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from decoder.policy.rule import ARMS

WINDOW_STEPS: Final = 512  # steps whose times are kept


def _times() -> deque[float]:
    return deque(maxlen=WINDOW_STEPS)


def _total(name: str) -> Any:
    """A total of the table."""
    return property(lambda counters: int(counters.counts[name][0]))


def _by_arm(name: str) -> Any:
    """A total of the table by arm."""

    def totals(counters: Counters) -> Counter[str]:
        values = counters.counts["arms"][0][name].tolist()
        return +Counter(dict(zip(ARMS, values, strict=True)))

    return property(totals)


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

    tokens = _total("tokens")  # committed
    labelled = _total("labelled")  # cache drafts with a resolved label
    undrafted = _total("undrafted")  # model drafts chosen but not made
    cycles = _by_arm("cycles")
    drafted = _by_arm("drafted")  # draft tokens verified
    accepted = _by_arm("accepted")  # draft tokens accepted
