"""What each kind of network is trained to minimise, and how well it foresaw what came.

One likelihood serves both. A cache draft faces one position after the other and breaks off at one
of them, unless it is accepted whole or its label is censored: a label that is a lower bound counts
for what it knows. What a model draft yields a worker follows by itself (``decoder.core.payoff``).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import BUCKET_OF, BUCKETS, MAX_DRAFT
from decoder.contracts.features import FloatArray
from decoder.policy.rule import MODEL
from learner.training.rows import Rows

Floats = NDArray[np.float64]

WORST: Final = -100.0
"""Log-likelihood that a draft counts as at least: one absurd feature would otherwise outweigh a
thousand clusters, and a policy that foresees no number at all has none."""


class Faced(NamedTuple):
    """What became of n drafts, in counts. Columns may be cut into more dimensions than [n]."""

    positions: FloatArray  # [n, BUCKETS] positions a cache draft faced, its last included
    ended: FloatArray  # [n, BUCKETS] 1 where it broke off, else 0
    broke: NDArray[np.bool_]  # [n] whether it broke off
    held: FloatArray  # [n] accepted tokens of a verified model draft, 0 without one
    tried: FloatArray  # [n] tokens it faced
    accepted: FloatArray  # [n] of the cache draft
    censored: NDArray[np.bool_]  # [n] whether that is a lower bound


SURVIVED: Final = np.zeros((MAX_DRAFT + 1, BUCKETS), np.float32)
"""Positions of each bucket that a draft of so many accepted tokens survived."""
SURVIVED[1:] = np.cumsum(BUCKET_OF[:, None] == np.arange(BUCKETS), axis=0)
_BEHIND: Final = np.eye(BUCKETS, dtype=np.float32)[np.append(BUCKET_OF, BUCKET_OF[-1])]
"""Bucket of the position behind the accepted ones, in place of a number a one in its column."""


def faced(rows: Rows) -> Faced:
    """What became of the drafts of ``rows``, none of which has more tokens than ``MAX_DRAFT``."""
    accepted = rows.accepted.astype(np.int64)
    broke = (accepted < rows.draft_len) & ~rows.censored
    ended = _BEHIND.take(accepted, axis=0)
    ended *= broke[:, None]
    positions = SURVIVED.take(accepted, axis=0)
    positions += ended
    seen = np.isfinite(rows.model_accepted) & (rows.arm == MODEL)
    held = np.where(seen, rows.model_accepted, 0.0).astype(np.float32)
    tried = held + (seen & (held < rows.verified_len))
    return Faced(positions, ended, broke, held, tried, rows.accepted, rows.censored)


def survival_likelihood(logits: FloatArray, found: Faced) -> Floats:
    """Log-likelihood [..., n], nats, of what became of n cache drafts with ``logits``
    [..., n, BUCKETS]."""
    lived = found.positions * _softplus(logits, _sigmoid(logits))
    likelihood: Floats = (found.ended * logits - lived).sum(axis=-1, dtype=np.float64)
    return likelihood


def survival_loss(outputs: FloatArray, found: Faced) -> tuple[Floats, FloatArray]:
    """Mean negative log-likelihood of drafts, nats a draft, and its gradient by the outputs.

    Args:
        outputs: float32 [..., n, BUCKETS] of networks.
        found: of the n drafts of each.

    Returns:
        the losses [...], and float32 [..., n, BUCKETS].
    """
    gradient = _sigmoid(outputs)
    lost = _softplus(outputs, gradient)
    lost *= found.positions
    lost -= found.ended * outputs
    gradient *= found.positions
    gradient -= found.ended
    n = outputs.shape[-2]
    gradient *= np.float32(1.0 / n)
    return lost.sum(axis=(-2, -1)) / n, gradient


def payoff_loss(outputs: FloatArray, found: Faced) -> tuple[Floats, FloatArray]:
    """Mean squared error of ``outputs`` [..., n, 1], tokens squared (paper, Table 10), and its
    gradient.

    A censored label is a lower bound: a prediction below it costs, one above it does not.
    """
    error = outputs - found.accepted[..., None]
    error[found.censored] = np.minimum(error[found.censored], 0.0)
    loss = np.square(error, dtype=np.float64).mean(axis=(-2, -1))
    return loss, error * np.float32(2.0 / outputs.shape[-2])


def bounded(likelihood: Floats) -> Floats:
    """``likelihood`` from ``WORST`` to zero; what is no number is the worst."""
    found: Floats = np.clip(np.nan_to_num(likelihood, nan=WORST, posinf=WORST), WORST, 0.0)
    return found


def _sigmoid(x: FloatArray) -> FloatArray:
    """Chances of the log-odds ``x``, none below what a float32 can take the logarithm of."""
    found: FloatArray = np.maximum(x, np.float32(-80.0))
    np.negative(found, out=found)
    np.exp(found, out=found)
    found += np.float32(1.0)
    return np.reciprocal(found, out=found)


def _softplus(x: FloatArray, chance: FloatArray) -> FloatArray:
    """``log(1 + exp(x))``, from the ``_sigmoid`` of ``x``."""
    found: FloatArray = np.log(chance)
    np.subtract(x, found, out=found)
    return np.maximum(found, np.float32(0.0), out=found)
