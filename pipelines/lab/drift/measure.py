"""Figures of a scenario: rates by policy, ratios with intervals, recoveries, alarms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from decoder.policy.rule import ARMS
from pipelines.lab.bench import metrics
from pipelines.lab.bench.metrics import Cell, number
from pipelines.lab.drift.stream import Run
from pipelines.lab.drift.traffic import Scenario, Traffic

LEARNS: Final = "adaptive"
LATE: Final = 150
"""Requests after a change from which on a learner is held to what retraining would have reached."""
START: Final = 50
"""Requests that are a new scope's first."""
SMOOTH: Final = 50
"""Requests over which a rate is taken to say whether it has recovered: the ratio of two policies
on fewer moves by more than the hundredth it is held to."""
RECOVERED: Final = 0.99
NOTICED: Final = 100
"""Requests after a change within which an alarm is taken for it."""
RESAMPLES: Final = 1_000
PAIRS: Final = (
    ("adaptive", "frozen"), ("adaptive", "first"), ("adaptive", "refit"),
    ("refit", "first"),
)  # fmt: skip

Mask = NDArray[np.bool_]
Runs = Mapping[str, Run]


def figures(scenario: Scenario, seed: int, traffic: Traffic, runs: Runs) -> dict[str, Any]:
    """All figures of one scenario and seed, plain JSON; rates are tokens a plain step.

    Windows of requests are all, the ``start``, those ``after`` the first change, and ``late``
    after one. Where nothing changes, all are after it.
    """
    changes: list[dict[str, Any]] = [
        {"at": at, "what": what, "segment": i}
        for i, at in enumerate(traffic.begins)
        if (what := scenario.changes(i))
    ]
    at = np.arange(len(traffic.requests))
    since = at if not changes else np.full(len(at), -1)
    for change in changes:
        since[change["at"] :] = at[: len(at) - change["at"]]
    windows = {"all": at >= 0, "start": at < START, "after": since >= 0, "late": since >= LATE}
    windows = {name: mask for name, mask in windows.items() if mask.any()}
    policies: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        figure = policies[name] = {}
        for window, mask in windows.items():
            tail = "" if window == "all" else f"_{window}"
            figure[f"rate{tail}"] = run.rate(mask)
        shares = run.cycles / max(1, run.cycles.sum())
        figure["cycles_by_arm"] = dict(zip(ARMS, shares.tolist(), strict=True))
    names: dict[str, int] = {}
    session = np.array([names.setdefault(r.trace.session, len(names)) for r in traffic.requests])
    made: dict[str, Any] = {
        "name": scenario.name,
        "seed": seed,
        "about": scenario.about,
        "requests": len(at),
        "policies": policies,
        "changes": changes,
        "ratios": {
            f"{one}/{other}": {
                window: _ratio(runs[one], runs[other], mask, session)
                for window, mask in windows.items()
            }
            for one, other in PAIRS
            if {one, other} <= runs.keys()
        },
    }
    if LEARNS in runs:
        made |= _learned(runs, [change["at"] for change in changes], at, windows.get("late"))
    return made


def _ratio(one: Run, other: Run, mask: Mask, session: NDArray[np.int64]) -> list[float]:
    """Ratio of rates and its 95% interval by resampling sessions (paired bootstrap, Efron and
    Tibshirani 1993, chapter 16): requests of one share their text."""
    # Both commit the same tokens, so the ratio of rates is that of times.
    _, group = np.unique(session[mask], return_inverse=True)
    mine, theirs = np.bincount(group, one.us[mask]), np.bincount(group, other.us[mask])
    n = len(mine)
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), RESAMPLES)
    low, high = np.quantile((weights @ theirs) / (weights @ mine), [0.025, 0.975])
    return [float(theirs.sum() / mine.sum()), float(low), float(high)]


def _learned(
    runs: Runs, changes: list[int], at: NDArray[np.int64], late: Mask | None
) -> dict[str, Any]:
    """How the learner did: requests until it recovered, by change; alarms, promotions."""
    run, refit = runs[LEARNS], runs.get("refit")
    ends = [*changes[1:], len(at)]
    made: dict[str, Any] = {
        "recovery_requests": [
            None if refit is None else _recovery(run, refit, at, *span)
            for span in zip(changes, ends, strict=False)
        ],
        "alarms": run.alarms,
        "false_alarms": sum(
            not any(begin <= alarm < begin + NOTICED for begin in changes) for alarm in run.alarms
        ),
        "promotions": run.promotions,
        "returns": run.returns,
        "comparisons": run.comparisons,
    }
    if late is not None and refit is not None and "first" in runs:
        base, best = runs["first"].rate(late), refit.rate(late)
        made["refit_over_first"] = best / base
        if best > base:
            made["gap_recovered"] = (run.rate(late) - base) / (best - base)
    return made


def _recovery(
    run: Run, reference: Run, at: NDArray[np.int64], begins: int, until: int
) -> int | None:
    """Requests from ``begins`` on until the rate over the ``SMOOTH`` that follow is ``RECOVERED``
    of the reference's on the same; None if it never is before ``until``."""
    for n in range(max(1, until - begins - SMOOTH + 1)):
        mask = (at >= begins + n) & (at < min(begins + n + SMOOTH, until))
        if mask.any() and run.rate(mask) >= RECOVERED * reference.rate(mask):
            return n
    return None


def table(summary: dict[str, Any]) -> Table:
    """Rates after the change, by scenario and seed."""

    def rate(r: dict[str, Any], name: str) -> str:
        return number(r["policies"][name].get("rate_after"), 3)

    columns: dict[str, Cell] = {"scenario": itemgetter("name"), "seed": lambda r: str(r["seed"])}
    columns |= {name: partial(rate, name=name) for name in summary["settings"]["policies"]}
    return metrics.table("Tokens a plain step, after the change", columns, summary["scenarios"])
