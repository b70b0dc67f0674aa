"""Figures of a replay: what each way of choosing is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.replay.cycles import NOTHING, Tally

ORACLE = "oracle"


@dataclass(frozen=True)
class Report:
    """What was measured on one file, or on several together."""

    name: str
    sessions: int
    generations: int
    tokens: int  # of output, in the part measured
    tallies: Mapping[str, Tally]
    thresholds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def fractions(self) -> dict[str, float]:
        """Each method's rate against the oracle's."""
        best = self.tallies[ORACLE].rate
        return {name: t.rate / best for name, t in self.tallies.items()} if best else {}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON; ``rates`` are tokens a plain step, shares are in 0..1."""
        tallies = self.tallies.items()
        return {
            "name": self.name,
            "sessions": self.sessions,
            "generations": self.generations,
            "tokens": self.tokens,
            "rates": {name: t.rate for name, t in tallies},
            "fraction_of_oracle": self.fractions(),
            "cycles_per_1k": {n: 1000 * t.cycles / max(t.committed, 1) for n, t in tallies},
            "cache_share": {n: t.by_arm[2] / max(t.cycles, 1) for n, t in tallies},
            "model_share": {n: t.by_arm[1] / max(t.cycles, 1) for n, t in tallies},
            "mean_accepted": {n: sum(t.accepted) / max(t.cycles, 1) for n, t in tallies},
            "thresholds": {n: t if np.isfinite(t) else None for n, t in self.thresholds.items()},
            "left_out": dict(self.left_out),
        }


def together(reports: list[Report]) -> Report:
    """All of ``reports`` as one: counts are added, so a file weighs what its tokens weigh."""
    names = list(reports[0].tallies)
    left_out = sum((Counter(r.left_out) for r in reports), Counter[str]())
    return Report(
        "overall",
        sum(r.sessions for r in reports),
        sum(r.generations for r in reports),
        sum(r.tokens for r in reports),
        {name: sum((r.tallies[name] for r in reports), NOTHING) for name in names},
        left_out=left_out,
    )


def mean_fractions(reports: list[Report]) -> dict[str, float]:
    """Mean over the files, each counting the same, of the fraction of the oracle's rate."""
    each = [r.fractions() for r in reports]
    return {name: float(np.mean([e[name] for e in each])) for name in each[0]} if each else {}
