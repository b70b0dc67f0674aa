"""Policies from recordings: learned on the cycles of simulated decoders, since a server sees only
the positions it stops at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.engines.reference.method import Method, method
from decoder.policy.estimate import PAPER_THRESHOLD
from learner import train
from learner.rows import Rows, joined
from pipelines.lab.replay.engine import Simulator, hybrid
from pipelines.lab.replay.traces import Trace

LEAST: Final = 500
"""Labelled drafts without which no survival policy is trained."""
EPOCHS: Final = 30
LONGER: Final = 2.0
"""Times the length of a worker's cache drafts that those have which survival is learned from. A
policy that has seen what becomes of longer ones cuts better, by one to three per cent at what a
processor's steps cost."""
PAPER_LEAST: Final = 200
PAPER_EPOCHS: Final = 20
PAPER_MOST: Final = 200_000
"""Drafts the paper's network is trained on: more cost minutes and move the figures little."""


def teachers() -> tuple[Method, Method]:
    """The decoders whose cycles are learned from.

    The model arm is only seen where it is taken: one takes it always, the other where counting
    speaks against the cache draft.
    """
    counting = hybrid("frequency", method("frequency").policy)  # on the drafts that hybrids see
    return hybrid("model", method("eagle3").policy), counting


def with_longer_drafts(simulator: Simulator) -> Simulator:
    """``simulator`` with cache drafts ``LONGER`` than a worker's."""
    factor = LONGER * simulator.settings.suffix_max_factor
    longer = simulator.settings.model_copy(update={"suffix_max_factor": factor})
    return replace(simulator, settings=longer)


def taught(simulator: Simulator, traces: Sequence[Trace], warm_up: Sequence[Trace] = ()) -> Rows:
    """The labelled drafts of ``traces``, decoded by each of the :func:`teachers`."""
    return joined([simulator.decode(traces, teacher, warm_up)[1] for teacher in teachers()])


def survival(
    rows: Rows, scope: str, epochs: int = EPOCHS, probes: FloatArray | None = None
) -> Policy:
    """A survival policy of version 0.

    Args:
        probes: features [n, features] on which the bundle is probed; by default those of the rows.

    Raises:
        TraceError: too few labelled drafts.
    """
    _enough(rows, LEAST)
    trainer = train.fit(rows, "survival", epochs)
    policy = train.export(
        trainer, scope, PAPER_THRESHOLD, rows.features if probes is None else probes
    )
    seen = rows.model_accepted[np.isfinite(rows.model_accepted)]
    return replace(policy, model_payoff=float(seen.mean()) if len(seen) else 0.0)


def paper(rows: Rows, scope: str) -> Policy:
    """The paper's network, which predicts accepted lengths, and its threshold.

    Raises:
        TraceError: too few labelled drafts.
    """
    _enough(rows, PAPER_LEAST)
    if len(rows) > PAPER_MOST:
        chosen = np.random.default_rng(train.SEED).permutation(len(rows))[:PAPER_MOST]
        rows = rows.take(np.sort(chosen))

    trainer = train.fit(rows, "payoff", PAPER_EPOCHS)
    return train.export(trainer, scope, PAPER_THRESHOLD, rows.features)


def _enough(rows: Rows, least: int) -> None:
    if len(rows) < least:
        raise TraceError(
            f"the recordings give {len(rows)} labelled drafts, {least} are needed: give more "
            "traces, or raise the limit."
        )
