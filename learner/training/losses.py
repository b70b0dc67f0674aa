"""Labels of drafts in counts, and the losses of both kinds of network on them.

A cache draft is a discrete survival time: it is at risk at one position after the other until one
is rejected (the event), it is accepted whole, or its request ends (right censoring). A censored
label counts as the lower bound that it is. What a model draft yields a worker follows by itself
(``decoder.core.payoff``).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import softplus

from decoder.contracts.bundle import BUCKET_OF, BUCKETS, MAX_DRAFT, Kind
from decoder.policy.rule import MODEL
from learner.training.rows import Rows

Floats = NDArray[np.float64]

WORST: Final = -100.0
"""Least score of a draft: one absurd feature would otherwise outweigh a thousand clusters."""


class Labels(NamedTuple):
    """Labels of n drafts. Columns may be cut into more dimensions than [n], or be tensors."""

    at_risk: (
        Any  # float32 [n, BUCKETS] positions verified of a cache draft, a rejected one included
    )
    events: Any  # float32 [n, BUCKETS] 1 where a position was rejected, else 0
    model_accepted: Any  # float32 [n] tokens of a verified model draft, 0 without one
    model_tried: Any  # float32 [n] the same with the rejected one
    accepted: Any  # float32 [n] tokens of the cache draft
    censored: Any  # bool [n] whether that is a lower bound


SURVIVED: Final = np.zeros((MAX_DRAFT + 1, BUCKETS), np.float32)
"""Positions of each bucket that a draft of so many accepted tokens survived."""
SURVIVED[1:] = np.cumsum(BUCKET_OF[:, None] == np.arange(BUCKETS), axis=0)
_REJECTED: Final = np.eye(BUCKETS, dtype=np.float32)[np.append(BUCKET_OF, BUCKET_OF[-1])]
"""Bucket of the position after the accepted ones, one-hot."""


def labels_of(rows: Rows) -> Labels:
    """The labels of ``rows``, none of which has more tokens than ``MAX_DRAFT``."""
    accepted = rows.accepted.astype(np.int64)
    rejected = (accepted < rows.draft_len) & ~rows.censored
    events = _REJECTED.take(accepted, axis=0)
    events *= rejected[:, None]
    at_risk = SURVIVED.take(accepted, axis=0)
    at_risk += events
    seen = np.isfinite(rows.model_accepted) & (rows.arm == MODEL)
    held = np.where(seen, rows.model_accepted, 0.0).astype(np.float32)
    tried = held + (seen & (held < rows.verified_len))
    return Labels(at_risk, events, held, tried, rows.accepted, rows.censored)


def tensors(labels: Labels) -> Labels:
    """``labels`` as tensors of the same memory."""
    return Labels(*map(torch.from_numpy, labels))


def losses(kind: Kind, outputs: torch.Tensor, labels: Labels) -> torch.Tensor:
    """What training minimises, [..., n] by draft: its negative log-likelihood in nats, or its
    squared error in tokens (paper, Table 10).

    Args:
        outputs: float32 [..., n, outputs] of networks of ``kind``.
        labels: tensors.
    """
    if kind == "survival":
        nats: torch.Tensor = labels.at_risk * softplus(outputs) - labels.events * outputs
        return nats.sum(dim=-1)
    return _error(outputs, labels).square()


def scores(kind: Kind, outputs: torch.Tensor, labels: Labels) -> Floats:
    """How well networks predicted drafts, in nats [..., n], each at least ``WORST``: by likelihood,
    for kind ``payoff`` Cauchy's at a scale of a token. A squared error is no likelihood without a
    variance, and one long draft would decide a thousand."""
    if kind == "survival":
        found = -losses(kind, outputs, labels)
    else:
        found = -torch.log1p(_error(outputs, labels).square())
    clipped: Floats = torch.nan_to_num(found, nan=WORST).clamp(WORST, 0.0).double().numpy()
    return clipped


def _error(outputs: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Prediction less label [..., n]; above a lower bound there is none."""
    error = outputs[..., 0] - labels.accepted
    return torch.where(labels.censored, error.clamp(max=0.0), error)
