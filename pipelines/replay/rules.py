"""Every rule on the same recordings: what each makes of a prompt set, and which is best.

A set's recordings are decoded in their order from an empty cache, by a router that keeps what it
learns from one to the next, as ``hvd bench decode`` does; times are those of a cost table, so a
figure has no noise of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.engines.reference.method import Method, method
from decoder.floor import Floor
from decoder.hindsight import Resolved
from pipelines.calibration import calibration
from pipelines.replay.engine import Simulator, hybrid
from pipelines.replay.traces import Trace
from pipelines.rival import against_best

HYBRID: Final = "hybrid"
LONGER: Final = 2.0
"""Tokens of a cache draft for each one matched, where a name ends in ``@2``."""


def rivals(model_len: int) -> dict[str, Method]:
    """Every fixed rule, and counting that learns as it goes, by name."""
    plain = ("greedy", "suffix", "frequency", "match4")
    found = {name: method(name) for name in (*plain, "buckets")}
    for name in plain[1:]:
        found[f"{name}@2"] = replace(method(name), draft_factor=LONGER)
    for k in range(1, model_len + 1):
        found[f"eagle3:{k}"] = replace(method("eagle3"), model_limit=k)
    return found


@dataclass(frozen=True)
class Ruled:
    """Tokens and time of n recordings, in the unit of the cost table; and by arm, ``cache`` and
    ``model``, the accepted tokens that were foreseen in each cycle and those that came, [m, 2]."""

    tokens: NDArray[np.float64]
    time: NDArray[np.float64]
    foreseen: Mapping[str, NDArray[np.float64]]

    @property
    def rate(self) -> float:
        """Tokens committed in a unit of time."""
        return float(self.tokens.sum() / self.time.sum())


class _Watch:
    """Notes of every cycle what was foreseen, and what came. A router's sink."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces
        self.rows: dict[str, list[tuple[int, int, float, int]]] = {"cache": [], "model": []}

    def put(self, resolved: Resolved) -> None:
        """Take in one cycle. Mutates."""
        _, name, _, label, censored = resolved
        index, cycle = int(name), label.subject
        step, known = cycle.step, self._traces[index].model_accepted
        truth = int(known[cycle.position]) if known is not None else 0
        model = float(np.float32(step.model[cycle.row])), min(truth, step.model_len)
        self.rows["model"].append((index, cycle.position, *model))
        if cycle.draft_len and not censored:
            cache = float(np.float32(step.expected[cycle.row])), label.accepted
            self.rows["cache"].append((index, cycle.position, *cache))

    def foreseen(self) -> dict[str, NDArray[np.float64]]:
        """By arm, in the order in which they were decoded."""
        return {
            arm: np.array(sorted(rows), np.float64).reshape(-1, 4)[:, 2:]
            for arm, rows in self.rows.items()
        }


def ruled(traces: Sequence[Trace], by: Method, simulator: Simulator) -> Ruled:
    """Decode ``traces`` by one rule; a learned one has the floor that a worker gives it."""
    watch, n = _Watch(traces), len(traces)
    floor = Floor(by.model != "none") if by.policy.kind == "survival" else None
    cycles, _ = simulator.decode(traces, by, floor=floor, watch=watch)
    return Ruled(
        np.bincount(cycles.trace, cycles.committed, n).astype(np.float64),
        np.bincount(cycles.trace, cycles.times(simulator.costs), n).astype(np.float64),
        watch.foreseen(),
    )


def all_ruled(traces: Sequence[Trace], policy: Policy, simulator: Simulator) -> dict[str, Ruled]:
    """One set by every rival, and by the hybrid that decides by ``policy``."""
    every = {**rivals(simulator.settings.model_draft_tokens), HYBRID: hybrid(HYBRID, policy)}
    return {name: ruled(traces, by, simulator) for name, by in every.items()}


def summary(sets: Mapping[str, Mapping[str, Ruled]]) -> dict[str, Any]:
    """Rates over greedy's by set and rule, and the hybrid's over the best rule of each set.

    ``hybrid_over_picked`` is over the rule that was best on the other half of the prompts,
    ``hybrid_over_best_single`` over the one rule that is best over all sets together.
    """
    over = {
        name: {rule: r.rate / by["greedy"].rate for rule, r in by.items()}
        for name, by in sets.items()
    }
    rules = [rule for rule in next(iter(over.values())) if rule != HYBRID]
    best = {name: max(rules, key=o.__getitem__) for name, o in over.items()}
    means = {
        rule: float(np.exp(np.mean([np.log(o[rule]) for o in over.values()])))
        for rule in (*rules, HYBRID)
    }
    single = max(rules, key=means.__getitem__)
    against = {name: o[HYBRID] / o[best[name]] for name, o in over.items()}
    spent = {
        name: {rule: (r.tokens, r.time) for rule, r in by.items()} for name, by in sets.items()
    }
    found = {n: against_best(by[HYBRID], {r: by[r] for r in rules}) for n, by in spent.items()}
    picked = {name: one for name, one in found.items() if one is not None}
    foreseen = [by[HYBRID].foreseen for by in sets.values()]
    return {
        "x_greedy": over,
        "hybrid_over_picked": {name: asdict(one) for name, one in picked.items()},
        "hybrid_over_picked_mean": _geometric([one.ratio for one in picked.values()]),
        "best_rule": best,
        "hybrid_over_best": against,
        "x_greedy_mean": means,
        "hybrid_over_best_mean": _geometric(list(against.values())),
        "best_single": single,
        "hybrid_over_best_single": means[HYBRID] / means[single],
        "calibration": {
            arm: calibration(*np.concatenate([by[arm] for by in foreseen]).T)
            for arm in ("cache", "model")
        },
    }


def _geometric(values: Sequence[float]) -> float | None:
    return float(np.exp(np.mean(np.log(values)))) if values else None
