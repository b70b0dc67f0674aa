"""What a winner may have learned from, for whoever looks at it in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.topics import DRAFTS
from decoder.policy.estimate import predict
from learner.gate import error_of
from learner.measured import NOMINAL, measure
from learner.rows import Rows
from learner.scope import Scope
from learner.tune import speed

SHOWN: Final = 4_000
"""Newest drafts over which errors and rates are shown: a tenth of a second, once a winner."""
POINTS: Final = 20


def learned_from(scope: Scope, winner: Policy, offsets: Mapping[int, int]) -> dict[str, Any]:
    """The window of a registration, as ``learner.registry.lineage`` has it.

    Args:
        offsets: by partition of the topic of draft events, the next record to be read.
    """
    rows = scope.buffer.recent(SHOWN)
    held = scope.buffer.recent(len(scope.buffer)).time
    found: dict[str, Any] = {
        **scope.window(),
        "topic": DRAFTS.name,
        "offsets": {str(partition): offset for partition, offset in sorted(offsets.items())},
    }
    if len(held):
        found |= {"time_from": float(held.min()), "time_to": float(held.max())}
        found["errors"] = errors(scope.champion, winner, rows)
    if winner.kind == "payoff" and len(held):
        found["thresholds"] = rates(winner, rows)
    return found


def errors(champion: Policy, winner: Policy, rows: Rows) -> list[list[float]]:
    """Rows of time, and of the champion's and the winner's mean absolute error in tokens then."""
    parts = [rows.take(part) for part in np.array_split(np.arange(len(rows)), POINTS) if len(part)]
    return [
        [float(part.time.mean()), error_of(champion, part), error_of(winner, part)]
        for part in parts
    ]


def rates(winner: Policy, rows: Rows) -> list[list[float]]:
    """Rows of threshold in tokens and rate, in tokens per microsecond or nominal step."""
    costs = measure(rows) or NOMINAL
    tried = np.unique(np.quantile(predict(winner, rows.features), np.linspace(0, 1, POINTS)))
    return [[float(t), speed(replace(winner, threshold=float(t)), rows, costs)] for t in tried]
