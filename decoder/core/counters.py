"""What a router has counted since it was made."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

REMEMBERED: Final = 512
"""Steps whose times are kept."""


def _times() -> deque[float]:
    return deque(maxlen=REMEMBERED)


@dataclass
class Counters:
    """Cumulative counts, and microseconds of the last steps.

    ``own_us`` is all that the router did in a step, and an engine's adapter for it; ``exposed_us``
    what of it the engine waited for; ``choose_us`` what a choice took.
    """

    started: int = 0
    stopped: int = 0
    tokens: int = 0
    labelled: int = 0
    probes: int = 0
    asleep: int = 0  # steps in which no draft was looked for
    undrafted: int = 0  # model drafts chosen and not made
    left_out: Counter[str] = field(default_factory=Counter)  # requests, by reason
    cycles: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    choose_us: deque[float] = field(default_factory=_times)
    own_us: deque[float] = field(default_factory=_times)
    exposed_us: deque[float] = field(default_factory=_times)
