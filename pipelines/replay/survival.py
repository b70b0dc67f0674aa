"""A survival policy from recordings: learned on the cycles of simulated decoders.

Every-token states would do for the network, but not for its memory and history: a server sees only
the positions it stops at, and features that were averaged over all of them mean something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.engines.reference.method import Method, method
from decoder.policy.estimate import PAPER_THRESHOLD
from decoder.settings import WorkerSettings
from learner import train
from learner.rows import Rows, joined
from pipelines.replay.engine import hybrid, simulate
from pipelines.replay.traces import Trace

LEAST: Final = 500
"""Labelled drafts without which nothing is trained."""
EPOCHS: Final = 30


@dataclass(frozen=True)
class Part:
    """Training recordings, and those that fill the cache before them."""

    traces: Sequence[Trace]
    warm_up: Sequence[Trace] = ()


def teachers() -> tuple[Method, Method]:
    """The decoders whose cycles are learned from.

    The model arm is only seen where it is taken: one takes it always, the other where counting
    speaks against the cache draft.
    """
    counting = hybrid("frequency", method("frequency").policy)  # on the drafts that hybrids see
    return hybrid("model", method("eagle3").policy), counting


def learn(
    parts: Sequence[Part],
    token_classes: FloatArray,
    settings: WorkerSettings,
    model_mean: float | None,
    scope: str,
) -> tuple[Policy, Rows]:
    """A survival policy of version 0, and what it was trained on.

    Args:
        model_mean: accepted length of model drafts where a recording does not hold it.

    Raises:
        TraceError: too few labelled drafts.
    """
    rows = joined(
        [
            simulate(p.traces, p.warm_up, teacher, token_classes, settings, model_mean)[1].rows
            for p in parts
            for teacher in teachers()
        ]
    )
    if len(rows) < LEAST:
        raise TraceError(f"the recordings give {len(rows)} labelled drafts, {LEAST} are needed.")
    trainer = train.fit(rows, "survival", EPOCHS)
    policy = train.export(trainer, scope, PAPER_THRESHOLD, rows.features)
    seen = rows.model_accepted[np.isfinite(rows.model_accepted)]
    return replace(policy, model_payoff=float(seen.mean()) if len(seen) else 0.0), rows
