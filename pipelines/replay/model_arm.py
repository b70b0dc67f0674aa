"""The model draft's accepted length at each position of a recording: recorded, or assumed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import TraceError
from pipelines.replay.traces import Trace


def constant_acceptance(mean: float, length: int) -> NDArray[np.int32]:
    """Accepted lengths [length] of a model draft whose every long stretch has this ``mean``.

    Whole numbers, spread as evenly as they go: the same at every position if ``mean`` is whole.
    """
    steps = np.floor(np.arange(length + 1) * mean + 1e-9)
    return np.diff(steps).astype(np.int32)


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
