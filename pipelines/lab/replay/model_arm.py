"""A model draft's accepted length at each position of a recording: recorded, drawn or assumed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import TraceError
from decoder.core.payoff.model_arm import chance_of
from pipelines.lab.replay.traces import Trace


def constant_acceptance(mean: float, length: int) -> NDArray[np.int32]:
    """Accepted lengths [length] of a model draft whose every long stretch has this ``mean``.

    Whole numbers, spread as evenly as they go: the same at every position if ``mean`` is whole.
    """
    steps = np.floor(np.arange(length + 1) * mean + 1e-9)
    return np.diff(steps).astype(np.int32)


def drawn_acceptance(
    mean: float, most: int, length: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Accepted lengths [length] of drafts of ``most`` tokens by a drafter that may be wrong about
    each token with the same chance, so that ``mean`` of them are accepted.

    A token is right or wrong for every draft that reaches it: neighbouring positions agree, as
    those of a real drafter do.
    """
    right = rng.random(length + most) < chance_of(mean, most)
    accepted = np.zeros(length, np.int32)
    alive = np.ones(length, np.bool_)
    for ahead in range(most):
        alive &= right[ahead : ahead + length]
        accepted += alive
    return accepted


def model_acceptance(trace: Trace, mean: float | None) -> NDArray[np.int32]:
    """The model draft's accepted length at each position of ``trace``.

    Args:
        mean: stands in where the recording does not hold it.

    Raises:
        TraceError: the recording does not hold it, and there is no ``mean``.
    """
    if trace.model_accepted is not None:
        return np.asarray(trace.model_accepted, np.int32)
    if mean is None:
        raise TraceError(
            f"session {trace.session} was recorded without a model arm: say what it accepts with "
            "--model-accepts."
        )
    return constant_acceptance(mean, len(trace.output))
