"""One step of the Kalman filter of :mod:`decoder.core.costs`, compiled."""

from __future__ import annotations

import numpy as np

from decoder.compiled import Float64Array, Float64Matrix, entry_point


@entry_point
def correct(
    state: Float64Array,
    spread: Float64Matrix,
    drift: Float64Matrix,
    below: int,
    slope: tuple[float, float, float],
    surprise: float,
    noise: float,
    least: float,
) -> None:
    """Take in a step that took ``surprise`` longer than expected, in logarithms. Mutates.

    Args:
        state, spread: [n] and its covariance, to which ``drift`` is added first.
        below, slope: what the logarithm of the step's time changes with the state's entries
            ``below``, the next one, and the last.
        noise: standard deviation of the surprise.
        least: of the last entry above the mean of the other two.
    """
    size, (first, second, last) = len(state), slope
    told = np.empty(size)
    for i in range(size):
        for j in range(size):
            spread[i, j] += drift[i, j]
        told[i] = first * spread[i, below] + second * spread[i, below + 1]
        told[i] += last * spread[i, size - 1]
    variance = first * told[below] + second * told[below + 1] + last * told[size - 1] + noise**2
    for i in range(size):
        state[i] += told[i] * (surprise / variance)
        for j in range(size):
            spread[i, j] -= told[i] * (told[j] / variance)
    mean = (first * state[below] + second * state[below + 1]) / (first + second)
    state[size - 1] = max(state[size - 1], mean + least)
