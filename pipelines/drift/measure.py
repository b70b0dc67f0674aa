"""Figures of a scenario: rates by policy, ratios with intervals, recoveries, alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.policy.rule import ARMS
from pipelines.drift.columns import LEARNS
from pipelines.drift.scenario import PLAIN_US, Scenario
from pipelines.drift.traffic import Traffic

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
    ("adaptive", "frozen"), ("adaptive", "first"), ("adaptive", "refit"), ("adaptive", "paper"),
    ("refit", "first"), ("first", "counting"), ("frozen", "paper"),
)  # fmt: skip

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """What one policy made of a scenario's requests: tokens, times in microseconds, cycles by arm
    in all. ``alarms`` and ``promotions`` are numbers of requests."""

    tokens: Sequence[int]
    us: Sequence[float]
    cycles: Sequence[int]
    alarms: Sequence[int] = ()
    promotions: Sequence[int] = ()

    def rate(self, mask: Mask) -> float:
        """Tokens in the time of a plain step, over the requests of ``mask`` [n]."""
        us = np.asarray(self.us)[mask].sum()
        return float(PLAIN_US * np.asarray(self.tokens)[mask].sum() / us) if us else 0.0


@dataclass(frozen=True)
class Course:
    """Where the requests of a scenario stand to its changes."""

    changes: list[dict[str, Any]]
    windows: dict[str, Mask]
    since: NDArray[np.int64]  # [n] requests since the last change, negative before the first
    session: NDArray[np.int64]  # [n]


def course(scenario: Scenario, traffic: Traffic) -> Course:
    """Windows of requests: ``all``, the ``start``, those ``after`` the first change, and ``late``
    after one. Where nothing changes, all are after it."""
    n = len(traffic.requests)
    changes: list[dict[str, Any]] = [
        {"at": at, "what": what, "segment": i}
        for i, at in enumerate(traffic.begins)
        if (what := scenario.changes(i))
    ]
    since = np.full(n, -1)
    for change in changes:
        since[change["at"] :] = np.arange(n - change["at"])
    if not changes:
        since = np.arange(n)
    names: dict[str, int] = {}
    session = [names.setdefault(r.trace.session, len(names)) for r in traffic.requests]
    windows = {
        "all": np.ones(n, np.bool_),
        "start": np.arange(n) < START,
        "after": since >= 0,
        "late": since >= LATE,
    }
    return Course(changes, windows, since, np.array(session))


def figures(
    scenario: Scenario, seed: int, traffic: Traffic, runs: Mapping[str, Run]
) -> dict[str, Any]:
    """All figures of one scenario and seed, plain JSON; rates are tokens a plain step."""
    found = course(scenario, traffic)
    oracle = runs.get("oracle")
    policies: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        figure: dict[str, Any] = {}
        for window, mask in found.windows.items():
            tail = "" if window == "all" else f"_{window}"
            figure[f"rate{tail}"] = run.rate(mask)
            if oracle is not None and mask.any():
                figure[f"oracle_fraction{tail}"] = run.rate(mask) / oracle.rate(mask)
        shares = np.array(run.cycles) / max(1, sum(run.cycles))
        figure["cycles_by_arm"] = dict(zip(ARMS, shares.tolist(), strict=True))
        policies[name] = figure
    made: dict[str, Any] = {
        "name": scenario.name,
        "seed": seed,
        "about": scenario.about,
        "requests": len(traffic.requests),
        "policies": policies,
        "changes": found.changes,
        "ratios": ratios(runs, found),
    }
    return {**made, **learned(runs, found)} if LEARNS in runs else made


def ratios(runs: Mapping[str, Run], found: Course) -> dict[str, dict[str, list[float]]]:
    """Of each pair and window: ratio of rates, and its 95% interval by resampling sessions
    (paired bootstrap, Efron and Tibshirani 1993, chapter 16): requests of one share their text."""
    made: dict[str, dict[str, list[float]]] = {}
    for one, other in PAIRS:
        if one in runs and other in runs:
            made[f"{one}/{other}"] = {
                window: _ratio(runs[one], runs[other], mask, found.session)
                for window, mask in found.windows.items()
                if mask.any()
            }
    return made


def _ratio(one: Run, other: Run, mask: Mask, session: NDArray[np.int64]) -> list[float]:
    # Both commit the same tokens, so the ratio of rates is that of times.
    _, group = np.unique(session[mask], return_inverse=True)
    mine = np.bincount(group, np.asarray(one.us)[mask])
    theirs = np.bincount(group, np.asarray(other.us)[mask])
    n = len(mine)
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), RESAMPLES)
    low, high = np.quantile((weights @ theirs) / (weights @ mine), [0.025, 0.975])
    return [float(theirs.sum() / mine.sum()), float(low), float(high)]


def learned(runs: Mapping[str, Run], found: Course) -> dict[str, Any]:
    """How the learner did: recoveries by change, alarms, promotions."""
    run = runs[LEARNS]
    recoveries = [
        recovery(run, runs.get("refit"), found, place) for place in range(len(found.changes))
    ]
    true = [any(c["at"] <= at < c["at"] + NOTICED for c in found.changes) for at in run.alarms]
    made: dict[str, Any] = {
        "recovery_requests": recoveries,
        "alarms": list(run.alarms),
        "false_alarms": true.count(False),
        "promotions": list(run.promotions),
    }
    late = found.windows["late"]
    if late.any() and {"first", "refit"} <= runs.keys():
        base, best = runs["first"].rate(late), runs["refit"].rate(late)
        made["refit_over_first"] = best / base
        if best > base:
            made["gap_recovered"] = (run.rate(late) - base) / (best - base)
    return made


def recovery(run: Run, reference: Run | None, found: Course, place: int) -> int | None:
    """Requests from change number ``place`` on until the rate over the ``SMOOTH`` that follow is
    ``RECOVERED`` of the reference's on the same; None if it never is."""
    if reference is None:
        return None
    begins = found.changes[place]["at"]
    following = [c["at"] for c in found.changes[place + 1 :]]
    until = following[0] if following else len(found.since)
    at = np.arange(len(found.since))
    for n in range(max(1, until - begins - SMOOTH + 1)):
        mask = (at >= begins + n) & (at < min(begins + n + SMOOTH, until))
        if mask.any() and run.rate(mask) >= RECOVERED * reference.rate(mask):
            return n
    return None
