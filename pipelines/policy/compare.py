"""Two policies on recorded generations: where they decide otherwise, and what it brought.

Each decodes every recording by itself, as ``hvd replay`` does; they are compared cycle by cycle
where both stood at the same place of the same recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.payoff.token_classes import token_classes_of
from decoder.policy.rule import ARMS
from decoder.settings import WorkerSettings
from pipelines.progress import Step
from pipelines.replay.engine import hybrid, simulate
from pipelines.replay.tally import NOTHING, Cycles
from pipelines.replay.traces import read


def compare(
    policies: tuple[Policy, Policy],
    paths: Sequence[Path],
    tokenizer: Any,
    limit: int,
    model_accepts: float,
    step: Step,
) -> list[dict[str, Any]]:
    """What both make of ``limit`` generations of each of ``paths``, and of all, which come first.

    Returns:
        plain records with rates in tokens by the time of a plain step, at nominal costs; a row of
        ``otherwise`` is of cycles at which the one took arm ``one`` and the other arm ``other``,
        with the mean of draft tokens that were accepted of each.

    Raises:
        TraceError: there is nothing to compare on.
    """
    classes, settings = token_classes_of(tokenizer), WorkerSettings.load()
    decoded = {}
    for path in paths:
        if traces := read(path, tokenizer).traces[:limit]:
            pair = []
            for at, policy in enumerate(policies):
                step(f"{path.stem}, {('one', 'other')[at]}", at, 2)
                method = hybrid("policy", policy)
                pair.append(simulate(traces, [], method, classes, settings, model_accepts)[0])
            decoded[path.stem] = pair
    if not decoded:
        raise TraceError("nothing to compare on: name recordings with --traces")
    found = [_compared(name, [pair]) for name, pair in decoded.items()]
    return [_compared("all", list(decoded.values())), *found] if len(found) > 1 else found


def _compared(name: str, pairs: Sequence[Sequence[Cycles]]) -> dict[str, Any]:
    both = [sum((c.tally() for c in side), NOTHING) for side in zip(*pairs, strict=True)]
    # columns: arm of the one, of the other; tokens verified of each; tokens accepted of each
    rows = np.concatenate([_side_by_side(*pair) for pair in pairs])
    apart = rows[(rows[:, 0] != rows[:, 1]) | (rows[:, 2] != rows[:, 3])]
    otherwise = []
    for a, b in np.unique(apart[:, :2], axis=0).tolist():
        here = apart[(apart[:, 0] == a) & (apart[:, 1] == b)]
        other = ARMS[b] if a != b else f"{ARMS[b]}, another length"
        row: dict[str, Any] = {"one": ARMS[a], "other": other, "cycles": len(here)}
        row["accepted_one"], row["accepted_other"] = here[:, 4:].mean(axis=0).tolist()
        otherwise.append(row)
    return {
        "name": name,
        "rates": [tally.rate for tally in both],
        "ratio": both[1].rate / both[0].rate if both[0].rate else 1.0,
        "cycles": [tally.cycles for tally in both],
        "cycles_by_arm": [dict(zip(ARMS, tally.by_arm, strict=True)) for tally in both],
        "cycles_at_the_same_place": len(rows),
        "otherwise": sorted(otherwise, key=lambda row: -row["cycles"]),
    }


def _side_by_side(one: Cycles, other: Cycles) -> Any:
    """Arms, verified and accepted draft tokens of both, int64 [n, 6], where both stood."""
    mine, theirs = ((c.trace.astype(np.int64) << 32) + c.position for c in (one, other))
    _, at, there = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    columns = [
        getattr(cycles, name)[index].astype(np.int64)
        for name in ("arm", "verified", "accepted")
        for cycles, index in ((one, at), (other, there))
    ]
    return np.stack(columns, axis=1)
