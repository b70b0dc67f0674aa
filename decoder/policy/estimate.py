"""Policy inference: expected accepted length of drafts, and the decision for each.

The learner tunes and gates with :func:`estimate` and :func:`decide_each`. A worker's step runs the
same functions of ``decoder.policy.loops``.

=============  ==================================  ===============================================
kind           predicts a cache draft's payoff by  takes the cache draft
=============  ==================================  ===============================================
``frequency``  the suffix cache's counted score    from ``threshold`` on (Frequency-Based Hybrid)
``payoff``     regression (paper, Table 10)        from ``threshold`` on (the paper's rule)
``survival``   a hazard at each draft position     while it pays: ``policy.rule``
=============  ==================================  ===============================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.features import FEATURES, FloatArray
from decoder.policy.loops import ALONE, choose_rows, curves_of, outputs_of
from decoder.policy.rule import CACHE, MODEL, NONE, Choice, Situation

PAPER_THRESHOLD: Final = 6.0
"""Predicted accepted tokens from which the paper verifies a cache draft (Section 4, Appendix A)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A policy's prediction for n cache drafts.

    ``expected`` [n] is the accepted length in tokens, from 0 to the draft's length. ``curves``
    [n, w], the chance to survive through each position, exists for kind ``survival`` only.
    """

    expected: FloatArray
    lengths: NDArray[np.int32]
    curves: FloatArray | None = None


def network(policy: Policy, features: FloatArray) -> FloatArray:
    """Raw outputs [n, outputs] of the policy's network for ``features`` float32 [n, features]."""
    return outputs_of(np.require(features, np.float32, _PLAIN), *policy.flat)


def survival(logits: FloatArray, lengths: NDArray[np.integer]) -> FloatArray:
    """Survival curves [n, longest] of n drafts of ``lengths`` [n] tokens, from a network's
    ``logits`` float32 [n, buckets]."""
    draft_lens, owners = np.array(lengths, np.int64), np.arange(len(lengths))
    return curves_of(np.require(logits, np.float32, _PLAIN), draft_lens, owners, len(draft_lens))


def estimate(policy: Policy, features: FloatArray) -> Estimate:
    """Predict the drafts described by ``features`` float32 [n, features]."""
    lengths = features[:, _DRAFT_LEN]
    draft_lens = lengths.astype(np.int32)
    if policy.kind == "survival":
        curves = survival(network(policy, features), draft_lens)
        return Estimate(curves.sum(axis=1), draft_lens, curves)
    raw = features[:, _SCORE] if policy.kind == "frequency" else network(policy, features)[:, 0]
    return Estimate(np.minimum(np.maximum(raw, 0.0), lengths), draft_lens)


def estimate_each(policies: Sequence[Policy], features: FloatArray) -> Estimate:
    """:func:`estimate` for ``survival`` policies: ``expected`` [p, n], ``curves`` [p, n, w]."""
    draft_lens = features[:, _DRAFT_LEN].astype(np.int32)
    logits = np.concatenate([network(policy, features) for policy in policies])
    curves = survival(logits, np.tile(draft_lens, len(policies)))
    curves = curves.reshape(len(policies), len(features), -1)
    return Estimate(curves.sum(axis=-1), draft_lens, curves)


def predict(policy: Policy, features: FloatArray) -> FloatArray:
    """Expected accepted length [n] in tokens of cache drafts with ``features`` [n, features]."""
    return estimate(policy, features).expected


_PLAIN: Final = ("C", "W")
_SCORE: Final = FEATURES.index("score")
_DRAFT_LEN: Final = FEATURES.index("draft_len")


def decide_each(
    policy: Policy,
    estimated: Estimate,
    model: FloatArray,
    situation: Situation,
    batch: NDArray[np.integer],
    rate: ArrayLike,
) -> Choice:
    """Arm and draft length of n rows, each from a step of its own, whose requests are all alike.

    ``batch`` [n] is the step's batch size. ``rate``, one or [n], is in tokens a request commits per
    plain step. ``model`` [n] is the expected accepted length of a model draft. With ``estimated``
    from :func:`estimate_each` the result is [policies, n].
    """
    k, costs = situation.model_len if policy.use_model else 0, situation.costs
    if policy.kind != "survival":
        use_cache = (estimated.expected >= policy.threshold) & (estimated.lengths > 0)
        arms = np.where(use_cache, CACHE, MODEL if k else NONE).astype(np.int8)
        return Choice(arms, np.where(use_cache, estimated.lengths, k).astype(np.int32))
    assert estimated.curves is not None
    *shape, width = estimated.curves.shape
    rows = np.empty(math.prod(shape), ALONE)
    for name, values in (("model", model), ("batch_size", batch), ("rate", rate)):
        rows[name] = np.broadcast_to(np.asarray(values), shape).reshape(-1)
    curves = np.require(estimated.curves.reshape(len(rows), width), np.float32, _PLAIN)
    arms, lengths = choose_rows(curves, rows, k, costs.dense, costs.prices)
    return Choice(arms.reshape(shape), lengths.reshape(shape))
