"""What a policy expects of drafts, and what it chooses of each.

The learner tunes and gates with :func:`estimate` and :func:`decide_each`; workers run the same
networks and the same rule, compiled for whole steps, in ``decoder.core.loops``.

=============  ==================================  ===============================================
kind           predicts a cache draft's payoff by  takes the cache draft
=============  ==================================  ===============================================
``frequency``  the suffix cache's counted score    from ``threshold`` on (Frequency-Based Hybrid)
``payoff``     regression (paper, Table 10)        from ``threshold`` on (the paper's rule)
``survival``   a hazard at each draft position     as long as it pays: ``policy.rule``
=============  ==================================  ===============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.features import FEATURES, FloatArray
from decoder.policy.rule import CACHE, MODEL, NONE, Choice, Situation, choose_each
from decoder.policy.survival import survival

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
    hidden = features
    last = len(policy.layers) - 1
    for index, (weight, bias) in enumerate(policy.folded):
        hidden = hidden.dot(weight)
        hidden += bias
        if index < last:
            np.maximum(hidden, 0.0, out=hidden)
    return hidden


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
    if policy.kind != "survival":
        return _threshold(policy, estimated, situation)
    assert estimated.curves is not None
    if not policy.use_model:
        situation = replace(situation, model_len=0)
    return choose_each(estimated.curves, model, batch, rate, situation)


def _threshold(policy: Policy, estimated: Estimate, situation: Situation) -> Choice:
    k = situation.model_len if policy.use_model else 0
    taken = (estimated.expected >= policy.threshold) & (estimated.lengths > 0)
    arms = np.where(taken, CACHE, MODEL if k else NONE).astype(np.int8)
    return Choice(arms, np.where(taken, estimated.lengths, k).astype(np.int32))
