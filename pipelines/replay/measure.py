"""Figures of a replay: how well payoffs are predicted, and what each way of choosing is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.policy.estimate import PAPER_THRESHOLD
from learner.rows import Rows
from pipelines.replay.cycles import NOTHING, Tally

ORACLE = "oracle"


@dataclass(frozen=True)
class Errors:
    """Sums over labelled drafts whose label is complete; parts of a whole can be added."""

    states: int = 0
    error: float = 0.0  # tokens, absolute
    high: int = 0  # accepted at least six
    chosen: int = 0  # predicted at least six
    both: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def figures(self) -> dict[str, float]:
        """``states``, ``mae`` in tokens, and precision and recall at the paper's six (Table 2)."""
        return {
            "states": self.states,
            "mae": self.error / max(self.states, 1),
            "precision_at_6": self.both / max(self.chosen, 1),
            "recall_at_6": self.both / max(self.high, 1),
            "high_payoff_share": self.high / max(self.states, 1),
        }


def errors(predicted: NDArray[np.float32], rows: Rows) -> Errors:
    """Compare ``predicted`` [n] tokens with the labels of ``rows``."""
    known = ~rows.censored
    guess, truth = predicted[known].astype(np.float64), rows.accepted[known]
    high, chosen = truth >= PAPER_THRESHOLD, guess >= PAPER_THRESHOLD
    return Errors(
        len(truth),
        float(np.abs(guess - truth).sum()),
        int(high.sum()),
        int(chosen.sum()),
        int((high & chosen).sum()),
    )


@dataclass(frozen=True)
class Report:
    """What was measured on one file, or on several together."""

    name: str
    sessions: int
    generations: int
    tokens: int  # of output, in the part measured
    errors: Errors
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
            **self.errors.figures(),
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
        sum((r.errors for r in reports), Errors()),
        {name: sum((r.tallies[name] for r in reports), NOTHING) for name in names},
        left_out=left_out,
    )


def mean_fractions(reports: list[Report]) -> dict[str, float]:
    """Mean over the files, each counting the same, of the fraction of the oracle's rate."""
    each = [r.fractions() for r in reports]
    return {name: float(np.mean([e[name] for e in each])) for name in each[0]} if each else {}
