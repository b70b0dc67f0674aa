"""Update step of the Kalman filter of :mod:`decoder.core.costs`, compiled."""

from __future__ import annotations

from decoder.compiled import Float64Array, Float64Matrix, entry_point


@entry_point
def correct(
    mean: Float64Array,
    covariance: Float64Matrix,
    below: int,
    slope: tuple[float, float, float],
    innovation: float,
    noise: float,
) -> None:
    """Update ``mean`` [n] and ``covariance`` [n, n] with a step whose log time exceeded the
    prediction by ``innovation``, of standard deviation ``noise``. ``slope`` are its derivatives by
    the entries ``below``, the next one, and the last. Mutates both."""
    size, (first, second, last) = len(mean), slope
    cross = first * covariance[below] + second * covariance[below + 1] + last * covariance[size - 1]
    variance = first * cross[below] + second * cross[below + 1] + last * cross[size - 1] + noise**2
    for i in range(size):
        mean[i] += cross[i] * (innovation / variance)
        for j in range(size):
            covariance[i, j] -= cross[i] * (cross[j] / variance)
