"""Policy inference: expected accepted length of drafts.

A worker's step and the learner's evaluation run the same functions of ``decoder.policy.loops``.

=============  ==================================  ===============================================
kind           predicts a cache draft's payoff by  takes the cache draft
=============  ==================================  ===============================================
``frequency``  the suffix cache's counted score    from ``threshold`` on (Frequency-Based Hybrid)
``payoff``     regression (paper, Table 10)        from ``threshold`` on (the paper's rule)
``survival``   a hazard at each draft position     while it pays: ``policy.rule``
=============  ==================================  ===============================================
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.features import FEATURES, FloatArray
from decoder.policy.loops import curves_of, outputs_of

PAPER_THRESHOLD: Final = 6.0
"""Predicted accepted tokens from which the paper verifies a cache draft (Section 4, Appendix A)."""


class Estimate(NamedTuple):
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


def predict(policy: Policy, features: FloatArray) -> FloatArray:
    """Expected accepted length [n] in tokens of cache drafts with ``features`` [n, features]."""
    return estimate(policy, features).expected


_PLAIN: Final = ("C", "W")
_SCORE: Final = FEATURES.index("score")
_DRAFT_LEN: Final = FEATURES.index("draft_len")
