"""How long a draft survives: a discrete hazard over draft positions, shared within buckets.

The network of a ``survival`` policy gives one logit a bucket: the log-odds that a draft which
survived so far breaks off at a position of that bucket. Survival through position ``j`` is the
product of the chances not to break off, the expected accepted length is the sum of survivals, and
the same holds for every truncation. Near positions have buckets of their own, far ones share.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import BUCKET_ENDS, BUCKETS, MAX_DRAFT
from decoder.contracts.features import FloatArray

BUCKET_OF: Final = np.searchsorted(np.array(BUCKET_ENDS), np.arange(1, MAX_DRAFT + 1))
"""Bucket of draft position ``j`` at index ``j - 1``: int64 [MAX_DRAFT]."""


def survival(logits: FloatArray, lengths: NDArray[np.integer]) -> FloatArray:
    """Chance that each draft survives through each of its positions.

    Args:
        logits: float32 [n, BUCKETS], log-odds of breaking off.
        lengths: integers [n], tokens of each draft, at most ``MAX_DRAFT``; 0 for no draft.

    Returns:
        float32 [n, max(lengths)], never rising along a row, 0 behind a draft's end.
    """
    width = int(lengths.max(initial=0))
    # The logarithm of living through a position is the same for all positions of a bucket, so
    # that of living through the first j of them is one product with how many fall into each.
    curve: FloatArray = np.logaddexp(_ZERO, logits).dot(_LIVED[:, :width])
    np.exp(curve, out=curve)
    curve *= _COLUMNS[:width] < lengths[:, None]
    return curve


_COLUMNS: Final = np.arange(MAX_DRAFT)
_LIVED: Final = -np.cumsum(np.arange(BUCKETS)[:, None] == BUCKET_OF, axis=1, dtype=np.float32)
"""float32 [BUCKETS, MAX_DRAFT]: minus the positions of each bucket up to and including ``j``."""
_ZERO: Final = np.float32(0.0)


def yields_of(chance: float, k: int) -> list[float]:
    """Expected accepted lengths of model drafts of 1 to ``k`` tokens, one more token being accepted
    with ``chance``: the geometric sums."""
    total, power, found = 0.0, 1.0, []
    for _ in range(k):
        power *= chance
        total += power
        found.append(total)
    return found
