"""How far what was foreseen can be relied on, by tenths."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def calibration(foreseen: ArrayLike, true: ArrayLike, parts: int = 10) -> list[dict[str, float]]:
    """Means of what was foreseen [n] and of what came [n], by decile of what was foreseen."""
    said, came = np.asarray(foreseen, np.float64), np.asarray(true, np.float64)
    order = np.argsort(said, kind="stable")
    return [
        {"n": len(part), "foreseen": float(said[part].mean()), "came": float(came[part].mean())}
        for part in np.array_split(order, parts)
        if len(part)
    ]
