"""What a broken arm makes of speed: the records that every trouble is told in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pipelines.bench.metrics import typical_rate, typical_times

if TYPE_CHECKING:
    from decoder.engines.reference.generation import CycleRecord

Trouble = Literal["drafter", "cache", "batch"]
TROUBLES: Final[tuple[Trouble, ...]] = get_args(Trouble)
PHASES: Final = ("healthy", "broken", "mended")
SETTLES: Final = 200
"""Cycles after a change that are not measured."""

Tick = Callable[[str], None]


@dataclass
class Speed:
    """One method in one phase; ``prompts`` are the measured ones.

    ``cycles`` is empty where only a server knows them.
    """

    decoded: int = 0
    seconds: float = 0.0
    prompts: int = 0
    cycles: list[CycleRecord] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second of decoding."""
        return self.decoded / self.seconds if self.seconds else 0.0

    def add(
        self, tokens: int, seconds: float, prompts: int = 1, cycles: Iterable[CycleRecord] = ()
    ) -> None:
        """Add measured prompts."""
        self.decoded += tokens
        self.seconds += seconds
        self.prompts += prompts
        self.cycles.extend(cycles)


@dataclass(frozen=True)
class Stretch:
    """What one phase came to. ``fallback`` is the arm the floor had in force at its end."""

    trouble: Trouble
    phase: str
    speeds: dict[str, Speed]
    settled_after: int
    fallback: str
    falls: int

    @property
    def best(self) -> str:
        """The fastest fixed arm."""
        return max(self.speeds.keys() - {"hybrid"}, key=lambda name: self.speeds[name].rate)

    @property
    def share(self) -> float:
        """The hybrid's rate over that of the best fixed arm."""
        return self.speeds["hybrid"].rate / self.speeds[self.best].rate

    @property
    def share_typical(self) -> float | None:
        """The same if every cycle took the median time of its kind; None without cycles."""
        times = typical_times(self.speeds.values())
        rates = {name: typical_rate([speed], times) for name, speed in self.speeds.items()}
        hybrid = rates.pop("hybrid")
        return hybrid / max(r for r in rates.values() if r) if hybrid else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "speeds"},
            "tok_per_s": {name: round(s.rate, 2) for name, s in self.speeds.items()},
            "best_fixed": self.best,
            "hybrid_to_best": round(self.share, 3),
            "hybrid_to_best_typical": self.share_typical and round(self.share_typical, 3),
            "hybrid_arms": dict(Counter(c.arm for c in self.speeds["hybrid"].cycles)),
            "prompts": self.speeds["hybrid"].prompts,
        }
