"""Labels of drafts, and the losses of both kinds of network.

The accepted length of a cache draft is a discrete survival time: each position is at risk until one
is rejected (the event), the draft is accepted whole, or its request ends (right censoring: the
label is a lower bound). Workers track the yield of model drafts themselves
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
"""Lowest score of a draft: an absurd feature would otherwise outweigh a thousand clusters."""


class Labels(NamedTuple):
    """Labels of n drafts; columns may have more dimensions than [n], or be tensors."""

    at_risk: Any  # float32 [n, BUCKETS] verified positions of a cache draft
    events: Any  # float32 [n, BUCKETS] 1 where a position was rejected, else 0
    model_accepted: Any  # float32 [n] accepted tokens of a model draft, 0 without one
    model_tried: Any  # float32 [n] at-risk tokens of a model draft
    accepted: Any  # float32 [n] accepted tokens of the cache draft
    censored: Any  # bool [n] whether ``accepted`` is a lower bound


SURVIVED: Final = np.zeros((MAX_DRAFT + 1, BUCKETS), np.float32)
"""Survived positions of each bucket by number of accepted tokens."""
SURVIVED[1:] = np.cumsum(BUCKET_OF[:, None] == np.arange(BUCKETS), axis=0)
_REJECTED: Final = np.eye(BUCKETS, dtype=np.float32)[np.append(BUCKET_OF, BUCKET_OF[-1])]
"""Bucket of the position after the accepted ones, one-hot."""


def labels_of(rows: Rows) -> Labels:
    """Labels of ``rows``, with at most ``MAX_DRAFT`` tokens each."""
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
    """``labels`` as tensors that share their memory."""
    return Labels(*map(torch.from_numpy, labels))


def losses(kind: Kind, outputs: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Training loss of each draft, [..., n]: negative log-likelihood in nats, or squared error in
    tokens (paper, Table 10).

    Args:
        outputs: float32 [..., n, outputs] of networks of ``kind``.
        labels: tensors.
    """
    if kind == "survival":
        nats: torch.Tensor = labels.at_risk * softplus(outputs) - labels.events * outputs
        return nats.sum(dim=-1)
    return _error(outputs, labels).square()


def scores(kind: Kind, outputs: torch.Tensor, labels: Labels) -> Floats:
    """Log-likelihood of each draft in nats, [..., n], at least ``WORST``; for kind ``payoff``,
    Cauchy's at a scale of one token: a squared error is no likelihood without a variance, and one
    long draft would outweigh a thousand."""
    if kind == "survival":
        found = -losses(kind, outputs, labels)
    else:
        found = -torch.log1p(_error(outputs, labels).square())
    clipped: Floats = torch.nan_to_num(found, nan=WORST).clamp(WORST, 0.0).double().numpy()
    return clipped


def _error(outputs: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Prediction error [..., n]; none above a lower bound."""
    error = outputs[..., 0] - labels.accepted
    return torch.where(labels.censored, error.clamp(max=0.0), error)
