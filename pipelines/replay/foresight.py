"""The payoff network of a replay, and what it would have said of sessions it never saw.

A network knows the sessions it was trained on too well: a threshold tuned on them comes out too
low. So the training sessions are halved, a network trained on either half predicts the other, and
thresholds are tuned on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.policy import PAPER_THRESHOLD, Policy, predict
from learner import train
from learner.rows import Rows
from pipelines.replay.split import fraction
from pipelines.replay.states import States, joined
from pipelines.replay.traces import Trace, TraceError

TRAINED_ON: Final = 200_000
"""States a network is trained on at most: more cost minutes and move the figures little."""
LEAST: Final = 200
"""States without which nothing is trained."""
EPOCHS: Final = 20

Step = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Foresight:
    """A policy, and for each file the payoffs [n] predicted of its training sessions' states."""

    policy: Policy
    training: list[NDArray[np.float32]]


def foresee(
    learned: Sequence[tuple[Sequence[Trace], States]], judged: Sequence[States], step: Step
) -> Foresight:
    """Train the paper's network on the training sessions of all files.

    Args:
        learned: of each file, its recordings and the states to learn from.
        judged: of each file, the states of the same recordings to predict.

    Raises:
        TraceError: too few states.
    """
    rows = joined([states.rows for _, states in learned])
    if len(rows) < LEAST:
        raise TraceError(
            f"the training sessions give {len(rows)} labelled drafts, {LEAST} are needed: give "
            "more traces, or raise --limit or --train-share."
        )
    policy = _trained(rows, "training", step)
    training = [predict(policy, states.rows.features) for states in judged]
    first = [_in_first_half(traces) for traces, _ in learned]
    for half in (True, False):
        mine = [s.rows.take(f[s.trace] == half) for f, (_, s) in zip(first, learned, strict=True)]
        if sum(map(len, mine)) < LEAST:
            continue
        other = _trained(joined(mine), f"training on half {2 - half}", step)
        for values, states, f in zip(training, judged, first, strict=True):
            unseen = f[states.trace] != half
            values[unseen] = predict(other, states.rows.features[unseen])
    return Foresight(policy, training)


def _in_first_half(traces: Sequence[Trace]) -> NDArray[np.bool_]:
    return np.array([fraction(t.session, "half") < 0.5 for t in traces], np.bool_)


def _trained(rows: Rows, what: str, step: Step) -> Policy:
    if len(rows) > TRAINED_ON:
        chosen = np.random.default_rng(train.SEED).permutation(len(rows))[:TRAINED_ON]
        rows = rows.take(np.sort(chosen))
    trainer = train.fit(
        rows, "payoff", EPOCHS, report=lambda epoch, _: step(what, epoch + 1, EPOCHS)
    )
    return train.export(trainer, "replay", PAPER_THRESHOLD, rows.features)
