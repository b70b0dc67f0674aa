"""What each kind of network is trained to minimise, censored labels counting for what they know."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import logsigmoid

from decoder.contracts.bundle import BUCKET_ENDS, BUCKETS
from decoder.policy.rule import MODEL
from decoder.policy.survival import BUCKET_OF
from learner.rows import Rows

MODEL_WEIGHT: Final = 1.0
"""Weight of the model arm's likelihood beside the cache arm's; both are per draft token."""


def payoff_loss(
    output: torch.Tensor, accepted: torch.Tensor, censored: torch.Tensor
) -> torch.Tensor:
    """Mean squared error [] of ``output`` [n] in tokens squared (paper, Table 10).

    A censored label is a lower bound: a prediction below it costs, one above it does not.
    """
    error = output - accepted
    return torch.where(censored, error.clamp(max=0.0), error).square().mean()


def survived(accepted: NDArray[np.integer]) -> NDArray[np.float32]:
    """Positions of each bucket [n, BUCKETS] that drafts of ``accepted`` [n] tokens survived."""
    ends = np.concatenate([[0], BUCKET_ENDS, [np.iinfo(np.int64).max]])
    inside: NDArray[np.integer] = np.clip(accepted[:, None], ends[:-1], ends[1:]) - ends[:-1]
    return inside.astype(np.float32)


def survival_loss(outputs: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Mean negative log-likelihood [] of what became of ``rows``, in nats a draft.

    A cache draft contributes one term for each position it lived through and, unless it was
    accepted whole or its label is censored, one for where it broke off. A model draft contributes
    the same with one chance for all its positions, where it was verified at all.

    Args:
        outputs: float32 [n, BUCKETS + 1] of the network.
    """
    hazard, odds = outputs[:, :BUCKETS], outputs[:, BUCKETS]
    accepted = rows.accepted.astype(np.int64)
    lived = torch.from_numpy(survived(accepted))
    broke = (accepted < rows.draft_len) & ~rows.censored
    where = torch.from_numpy(BUCKET_OF[np.minimum(accepted, len(BUCKET_OF) - 1)])
    cache = -(lived * logsigmoid(-hazard)).sum(dim=1)
    ending = logsigmoid(hazard.gather(1, where[:, None])[:, 0])
    cache = cache - torch.where(torch.from_numpy(broke), ending, torch.zeros_like(ending))
    seen = np.isfinite(rows.model_accepted) & (rows.arm == MODEL)
    yielded = np.where(seen, rows.model_accepted, 0.0).astype(np.float32)
    stopped = (seen & (yielded < rows.verified_len)).astype(np.float32)
    model = -(torch.from_numpy(yielded) * logsigmoid(odds))
    model = model - torch.from_numpy(stopped) * logsigmoid(-odds)
    return (cache + MODEL_WEIGHT * model).mean()
