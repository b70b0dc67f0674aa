"""What a policy expects of drafts, and what it chooses of each.

The learner tunes and gates with :func:`estimate` and :func:`decide_each`; a worker's step runs the
same functions of ``decoder.policy.loops``.

=============  ==================================  ===============================================
kind           predicts a cache draft's payoff by  takes the cache draft
=============  ==================================  ===============================================
``frequency``  the suffix cache's counted score    from ``threshold`` on (Frequency-Based Hybrid)
``payoff``     regression (paper, Table 10)        from ``threshold`` on (the paper's rule)
``survival``   a hazard at each draft position     as long as it pays: ``policy.rule``
=============  ==================================  ===============================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """What a policy expects of n cache drafts.

    ``expected`` [n] is the accepted length in tokens, at least 0 and at most the draft's length. Of
    the kind ``survival`` alone: ``curves`` [n, w], the chance to survive through each position.
    """

    expected: FloatArray
    lengths: NDArray[np.int32]
    curves: FloatArray | None = None


def network(policy: Policy, features: FloatArray) -> FloatArray:
    """Raw outputs [n, outputs] of the policy's network for ``features`` float32 [n, features]."""
    return outputs_of(np.require(features, np.float32, _PLAIN), *policy.flat)


def survival(logits: FloatArray, lengths: NDArray[np.integer]) -> FloatArray:
    """Chance [n, longest] that each of n drafts of ``lengths`` [n] tokens survives through each of
    its positions, by the ``logits`` float32 [n, buckets] of a network."""
    whole, owners = np.array(lengths, np.int64), np.arange(len(lengths))
    return curves_of(np.require(logits, np.float32, _PLAIN), whole, owners, len(whole))


def estimate(policy: Policy, features: FloatArray) -> Estimate:
    """What ``policy`` expects of the drafts described by ``features`` float32 [n, features]."""
    lengths = features[:, _DRAFT_LEN]
    whole = lengths.astype(np.int32)
    if policy.kind == "survival":
        curves = survival(network(policy, features), whole)
        return Estimate(curves.sum(axis=1), whole, curves)
    raw = features[:, _SCORE] if policy.kind == "frequency" else network(policy, features)[:, 0]
    return Estimate(np.minimum(np.maximum(raw, 0.0), lengths), whole)


def estimate_alike(policies: Sequence[Policy], features: FloatArray) -> Estimate:
    """:func:`estimate` of policies of the kind ``survival``: ``expected`` is [policies, n],
    ``curves`` [policies, n, w]."""
    whole = features[:, _DRAFT_LEN].astype(np.int32)
    logits = np.concatenate([network(policy, features) for policy in policies])
    curves = survival(logits, np.tile(whole, len(policies)))
    curves = curves.reshape(len(policies), len(features), -1)
    return Estimate(curves.sum(axis=-1), whole, curves)


def predict(policy: Policy, features: FloatArray) -> FloatArray:
    """Expected accepted length [n], tokens, of the cache drafts with ``features`` [n, features]."""
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
    """Arm and draft length of n rows of different steps, each shared by ``batch`` [n] requests and
    decided at ``rate``, one or [n], in tokens that a request commits in the time of a plain step;
    ``model`` [n] is the accepted length that their worker expected of a model draft. Where
    ``estimated`` is of policies alike, so is the choice: [policies, n].
    """
    k = situation.model_len if policy.use_model else 0
    if policy.kind != "survival":
        taken = (estimated.expected >= policy.threshold) & (estimated.lengths > 0)
        arms = np.where(taken, CACHE, MODEL if k else NONE).astype(np.int8)
        return Choice(arms, np.where(taken, estimated.lengths, k).astype(np.int32))
    assert estimated.curves is not None
    return choose_each(estimated.curves, model, batch, rate, replace(situation, model_len=k))


def choose_each(
    curves: FloatArray,
    model: FloatArray,
    batch: NDArray[np.integer],
    rate: ArrayLike,
    situation: Situation,
) -> Choice:
    """The best choice of each of n independent rows, or of each by several policies.

    Args:
        curves: float32 [..., n, w] of :func:`survival`.
        model: float32 [n], expected accepted length of the model draft.
        batch: integers [n], requests that share the row's step, each as this one.
        rate: tokens a request commits in the time of a plain step, one or [n].
    """
    shape, costs = curves.shape[:-1], situation.costs

    rows = np.empty(math.prod(shape), ALONE)
    for name, of_rows in (("model", model), ("batch_size", batch), ("rate", rate)):
        rows[name] = np.broadcast_to(np.asarray(of_rows), shape).reshape(-1)
    arms, lengths = choose_rows(
        np.require(curves.reshape(len(rows), curves.shape[-1]), np.float32, _PLAIN), rows,
        situation.model_len, costs.dense, costs.prices,
    )  # fmt: skip
    return Choice(arms.reshape(shape), lengths.reshape(shape))
