"""Figures that cannot always be had: None where there is nothing to make one of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np


def over(part: float | None, whole: float | None) -> float | None:
    """``part`` divided by ``whole``, if that is not 0."""
    return None if part is None or not whole else part / whole


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Of ``values``, if there are any."""
    return float(np.percentile(values, percent)) if values else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those ``values`` that are known."""
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None
