"""The payoff network of a replay, and what it would have said of sessions it never saw.

A network knows the sessions it was trained on too well: a threshold tuned on them comes out too
low. So the training sessions are halved, a network trained on either half decodes the other, and
thresholds are tuned on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.policy.estimate import PAPER_THRESHOLD
from learner import train
from learner.rows import Rows, joined
from pipelines.progress import Step
from pipelines.replay.split import fraction, some_sessions
from pipelines.replay.states import States
from pipelines.replay.tally import NOTHING, Tally
from pipelines.replay.traces import Trace

TRAINED_ON: Final = 200_000
"""States a network is trained on at most: more cost minutes and move the figures little."""
LEAST: Final = 200
"""States without which nothing is trained."""
EPOCHS: Final = 20
TUNED_ON: Final = 40
"""Generations of each half that are decoded for each threshold."""
GRID: Final = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Thresholds tried, in tokens of predicted payoff."""

Decode = Callable[[Sequence[Trace], Policy], Tally]


@dataclass(frozen=True)
class Foresight:
    """A policy, and those that know nothing of the first and of the second half of the sessions."""

    policy: Policy
    halves: tuple[Policy, Policy]

    def tune(self, traces: Sequence[Trace], decode: Decode) -> float:
        """The threshold of :data:`GRID` with which training sessions decode fastest.

        Decoded cycle by cycle, and not read off the states of every position: what a request has
        shown so far looks different when only some positions are visited.

        Args:
            decode: what a policy makes of recordings.
        """
        parts = [[t for t in traces if _in_first_half(t) == first] for first in (True, False)]
        parts = [some_sessions(part, TUNED_ON) for part in parts]

        def rate(threshold: float) -> float:
            policies = (replace(policy, threshold=threshold) for policy in self.halves)
            made = (decode(part, policy) for part, policy in zip(parts, policies, strict=True))
            return sum(made, NOTHING).rate

        rates = {threshold: rate(threshold) for threshold in GRID}
        return max(GRID, key=lambda threshold: (rates[threshold], threshold))


def foresee(learned: Sequence[tuple[Sequence[Trace], States]], step: Step) -> Foresight:
    """Train the paper's network on the training sessions of all files.

    Args:
        learned: of each file, its recordings and the states to learn from.

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
    halves = []
    for name, other in (("second", False), ("first", True)):
        kept = [
            states.rows.take(
                np.array([_in_first_half(t) == other for t in traces], np.bool_)[states.trace]
            )
            for traces, states in learned
        ]
        enough = sum(map(len, kept)) >= LEAST
        halves.append(_trained(joined(kept), f"training on the {name} half", step)
                      if enough else policy)  # fmt: skip
    return Foresight(policy, (halves[0], halves[1]))


def _in_first_half(trace: Trace) -> bool:
    return fraction(trace.session, "half") < 0.5


def _trained(rows: Rows, what: str, step: Step) -> Policy:
    if len(rows) > TRAINED_ON:
        chosen = np.random.default_rng(train.SEED).permutation(len(rows))[:TRAINED_ON]
        rows = rows.take(np.sort(chosen))
    trainer = train.fit(
        rows, "payoff", EPOCHS, report=lambda epoch, _: step(what, epoch + 1, EPOCHS)
    )
    return train.export(trainer, "replay", PAPER_THRESHOLD, rows.features)
