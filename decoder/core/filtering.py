"""Update step of the Kalman filter of :mod:`decoder.core.costs`, compiled."""

from __future__ import annotations

import numpy as np

from decoder.compiled import Float64Array, Float64Matrix, entry_point


@entry_point
def correct(
    state: Float64Array,
    covariance: Float64Matrix,
    drift: Float64Matrix,
    below: int,
    slope: tuple[float, float, float],
    innovation: float,
    noise: float,
    least: float,
) -> None:
    """Update with a step whose log time exceeded the prediction by ``innovation``. Mutates.

    Args:
        state, covariance: [n] and [n, n]; ``drift`` is first added to the covariance.
        below, slope: derivatives of the step's log time by the state's entries ``below``, the next
            one, and the last.
        noise: standard deviation of the observation.
        least: lower bound of the last entry minus the mean of the other two.
    """
    size, (first, second, last) = len(state), slope
    cross = np.empty(size)
    for i in range(size):
        for j in range(size):
            covariance[i, j] += drift[i, j]
        cross[i] = first * covariance[i, below] + second * covariance[i, below + 1]
        cross[i] += last * covariance[i, size - 1]
    variance = first * cross[below] + second * cross[below + 1] + last * cross[size - 1] + noise**2
    for i in range(size):
        state[i] += cross[i] * (innovation / variance)
        for j in range(size):
            covariance[i, j] -= cross[i] * (cross[j] / variance)
    mean = (first * state[below] + second * state[below + 1]) / (first + second)
    state[size - 1] = max(state[size - 1], mean + least)
