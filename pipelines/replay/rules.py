"""Every rule on the same recordings: what each makes of a prompt set, and which is best.

A set's recordings are decoded in their order from an empty cache, by a router that keeps what it
learns from one to the next, as ``hvd bench decode`` does; times are those of a cost table, so a
figure has no noise of the machine. :class:`Account` keeps, of every cycle, what was foreseen of
both arms and what either would have brought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.features import FloatArray
from decoder.engines.reference.method import Method, method
from decoder.floor import Floor
from decoder.hindsight import Resolved
from decoder.policy.pricing import CostTable
from decoder.policy.rule import GRAFT
from decoder.settings import WorkerSettings
from pipelines.replay.baseline import against_best
from pipelines.replay.engine import hybrid, simulate
from pipelines.replay.tally import Cycles
from pipelines.replay.traces import Trace
from pipelines.watch.calibration import calibration

HYBRID: Final = "hybrid"
GRAFTING: Final = "hybrid+graft"
"""The hybrid that appends cache drafts to its model drafts."""
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
class Account:
    """Cycles of one rule on one set, a row each; lengths in tokens.

    ``label`` is what of the cache draft of ``draft_len`` tokens would have been accepted, a lower
    bound where ``censored``; ``truth`` the same of a model draft of full length.
    """

    trace: NDArray[np.int64]
    position: NDArray[np.int64]
    arm: NDArray[np.int64]
    verified: NDArray[np.int64]
    draft_len: NDArray[np.int64]
    label: NDArray[np.int64]
    censored: NDArray[np.bool_]
    expected: FloatArray
    model: FloatArray
    model_len: NDArray[np.int64]
    truth: NDArray[np.int64]


@dataclass(frozen=True)
class Ruled:
    """Tokens and time of n recordings, in the unit of the cost table, and the accounts.

    ``tails`` are model drafts with a tail, tokens of tails, and those of them that were accepted.
    """

    tokens: NDArray[np.float64]
    time: NDArray[np.float64]
    account: Account
    tails: tuple[int, int, int]

    @property
    def rate(self) -> float:
        """Tokens committed in a unit of time."""
        return float(self.tokens.sum() / self.time.sum())


class _Watch:
    """Notes of every cycle. A router's sink."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces
        self.rows: list[tuple[float, ...]] = []

    def put(self, resolved: Resolved) -> None:
        """Take in one cycle. Mutates."""
        _, name, _, label, censored = resolved
        index = int(name)
        cycle = label.subject
        if cycle.arm == GRAFT:
            return  # a part of a cycle that is noted
        step, known = cycle.step, self._traces[index].model_accepted
        truth = int(known[cycle.position]) if known is not None else 0
        self.rows.append(
            (
                index, cycle.position, cycle.arm, cycle.verified_len, cycle.draft_len,
                label.accepted, bool(censored), float(step.expected[cycle.row]),
                float(step.model[cycle.row]), step.model_len, truth,
            )
        )  # fmt: skip

    def account(self) -> Account:
        """All rows, in the order in which they were decoded."""
        table = np.array(sorted(self.rows), np.float64).reshape(-1, len(fields(Account)))
        kinds = {"censored": np.bool_, "expected": np.float32, "model": np.float32}
        columns = zip(fields(Account), table.T, strict=True)
        return Account(**{f.name: c.astype(kinds.get(f.name, np.int64)) for f, c in columns})


def ruled(
    traces: Sequence[Trace],
    by: Method,
    token_classes: FloatArray,
    settings: WorkerSettings,
    costs: CostTable,
) -> Ruled:
    """Decode ``traces`` by one rule; a learned one has the floor that a worker gives it."""
    watch = _Watch(traces)
    floor = Floor(by.model != "none") if by.policy.kind == "survival" else None
    cycles, _ = simulate(
        traces, [], by, token_classes, settings, None, costs, floor=floor, watch=watch
    )
    n = len(traces)
    return Ruled(
        np.bincount(cycles.trace, cycles.committed, n).astype(np.float64),
        np.bincount(cycles.trace, times(cycles, costs), n).astype(np.float64),
        watch.account(),
        _tails(cycles),
    )


def _tails(cycles: Cycles) -> tuple[int, int, int]:
    chain = cycles.verified - cycles.tail
    accepted = np.where(cycles.tail > 0, np.maximum(cycles.accepted - chain, 0), 0)
    return int((cycles.tail > 0).sum()), int(cycles.tail.sum()), int(accepted.sum())


def times(cycles: Cycles, costs: CostTable) -> NDArray[np.float64]:
    """Time of each cycle, run alone: float64 [n]."""
    drafted = cycles.drafted
    drafting = [costs.drafting(k, 1) for k in range(int(drafted.max(initial=0)) + 1)]
    found: NDArray[np.float64] = costs.verifying(1 + cycles.verified) + np.array(drafting)[drafted]
    return found


def all_ruled(
    traces: Sequence[Trace],
    policy: Policy,
    token_classes: FloatArray,
    settings: WorkerSettings,
    costs: CostTable,
) -> dict[str, Ruled]:
    """One set by every rival, and by the hybrid that decides by ``policy``, with tails and without.

    Raises:
        TraceError: the recordings do not hold their model drafts.
    """
    every = {
        **rivals(settings.model_draft_tokens),
        HYBRID: replace(hybrid(HYBRID, policy), graft=False),
        GRAFTING: replace(hybrid(GRAFTING, policy), graft=True),
    }
    return {n: ruled(traces, by, token_classes, settings, costs) for n, by in every.items()}


def summary(sets: Mapping[str, Mapping[str, Ruled]]) -> dict[str, Any]:
    """Rates over greedy's by set and rule, and the hybrid's over the best rule of each set.

    ``hybrid_over_picked`` is over the rule that was best on the other half of the prompts,
    ``hybrid_over_best_single`` over the one rule that is best over all sets together,
    ``graft_over_hybrid`` what tails add by set.
    """
    over = {
        name: {rule: r.rate / by["greedy"].rate for rule, r in by.items()}
        for name, by in sets.items()
    }
    rules = [rule for rule in next(iter(over.values())) if rule not in (HYBRID, GRAFTING)]
    best = {name: max(rules, key=o.__getitem__) for name, o in over.items()}
    means = {
        rule: float(np.exp(np.mean([np.log(o[rule]) for o in over.values()])))
        for rule in (*rules, HYBRID, GRAFTING)
    }
    single = max(rules, key=means.__getitem__)
    against = {name: o[HYBRID] / o[best[name]] for name, o in over.items()}
    added = {name: o[GRAFTING] / o[HYBRID] for name, o in over.items()}
    spent = {
        name: {rule: (r.tokens, r.time) for rule, r in by.items()} for name, by in sets.items()
    }
    found = {n: against_best(by[HYBRID], {r: by[r] for r in rules}) for n, by in spent.items()}
    picked = {name: one for name, one in found.items() if one is not None}
    return {
        "x_greedy": over,
        "hybrid_over_picked": {name: asdict(one) for name, one in picked.items()},
        "hybrid_over_picked_mean": _geometric([one.ratio for one in picked.values()]),
        "best_rule": best,
        "hybrid_over_best": against,
        "x_greedy_mean": means,
        "hybrid_over_best_mean": _geometric(list(against.values())),
        "graft_over_hybrid": added,
        "graft_over_hybrid_mean": _geometric(list(added.values())),
        "tails": {
            name: dict(zip(("made", "verified", "accepted"), by[GRAFTING].tails, strict=True))
            for name, by in sets.items()
        },
        "best_single": single,
        "hybrid_over_best_single": means[HYBRID] / means[single],
        "calibration": {
            arm: calibration(*_foreseen([by[HYBRID].account for by in sets.values()], arm))
            for arm in ("cache", "model")
        },
    }


def _geometric(values: Sequence[float]) -> float | None:
    return float(np.exp(np.mean(np.log(values)))) if values else None


def _foreseen(
    accounts: Sequence[Account], arm: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What was foreseen of one arm in every cycle, and what it was or would have been."""
    foreseen, true = [], []
    for a in accounts:
        if arm == "cache":
            kept = (a.draft_len > 0) & ~a.censored
            foreseen.append(a.expected[kept])
            true.append(a.label[kept])
        else:
            foreseen.append(a.model)
            true.append(np.minimum(a.truth, a.model_len))
    return np.concatenate(foreseen).astype(np.float64), np.concatenate(true).astype(np.float64)
