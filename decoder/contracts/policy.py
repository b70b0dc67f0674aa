"""The policy: how a worker chooses between drafts, and the functions that apply it.

The learner tunes and gates with :func:`estimate` and :func:`decide_each`; workers run the same
networks and the same rule, compiled for whole steps, in ``decoder.choice``. ``contracts.bundle``
puts a policy on the wire.

=============  ==================================  ===============================================
kind           predicts a cache draft's payoff by  takes the cache draft
=============  ==================================  ===============================================
``frequency``  the suffix cache's counted score    from ``threshold`` on (Frequency-Based Hybrid)
``payoff``     regression (paper, Table 10)        from ``threshold`` on (the paper's rule)
``survival``   a hazard at each draft position     as long as it pays: ``contracts.rule``
=============  ==================================  ===============================================
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import Arm
from decoder.contracts.features import FEATURES, NUM_FEATURES, SCHEMA_ID
from decoder.contracts.rule import (
    CACHE,
    MODEL,
    NONE,
    Choice,
    Situation,
    choose_each,
)
from decoder.contracts.survival import (
    BUCKETS,
    FloatArray,
    chain_yield,
    survival,
)

Kind = Literal["frequency", "payoff", "survival"]

PAPER_THRESHOLD: Final = 6.0
"""Predicted accepted tokens from which the paper verifies a cache draft (Section 4, Appendix A)."""
PROBES: Final = 16
OUTPUTS: Final[dict[str, int]] = {"frequency": 0, "payoff": 1, "survival": BUCKETS + 1}
"""Numbers the network of each kind predicts: a survival network's last is the model draft's."""

ARMS: Final[tuple[Arm, ...]] = ("none", "model", "cache")


@dataclass(frozen=True)
class Policy:
    """How to choose, valid for one scope and one feature schema.

    ``layers`` are (weight [in, out], bias [out]) float32 pairs of a ReLU network over
    ``(x - mean) / std``. ``threshold`` is in tokens and belongs to the kinds ``frequency`` (what a
    scope starts from before anything was learned) and ``payoff``; ``rate``, tokens a request
    commits in the time of a step that verifies no draft, to ``survival``: it is what a worker
    starts from, and what its own rate replaces. ``use_model`` is false
    when the learner found the model draft slower than drafting nothing. ``model_payoff`` is the
    mean accepted length of model drafts when the policy was made.
    """

    scope: str
    version: int
    threshold: float
    kind: Kind = "payoff"
    mean: FloatArray = field(default_factory=lambda: np.zeros(NUM_FEATURES, np.float32))
    std: FloatArray = field(default_factory=lambda: np.ones(NUM_FEATURES, np.float32))
    layers: tuple[tuple[FloatArray, FloatArray], ...] = ()
    rate: float = 2.0
    use_model: bool = True
    model_payoff: float = 0.0
    schema_id: str = SCHEMA_ID
    probe_inputs: FloatArray = field(
        default_factory=lambda: np.zeros((0, NUM_FEATURES), np.float32)
    )
    provenance: dict[str, Any] = field(default_factory=dict)

    def with_probes(self, inputs: FloatArray) -> Policy:
        """The same policy carrying up to ``PROBES`` rows of ``inputs`` [n, features] as probes."""
        return replace(self, probe_inputs=np.ascontiguousarray(inputs[:PROBES], np.float32))

    @cached_property
    def folded(self) -> tuple[tuple[FloatArray, FloatArray], ...]:
        """``layers`` with the normaliser absorbed into the first, for raw features."""
        if not self.layers:
            return ()
        (weight, bias), *rest = self.layers
        with np.errstate(all="ignore"):  # a policy that cannot be served is refused by its checks
            scaled = weight.astype(np.float64) / self.std.astype(np.float64)[:, None]
            shifted = bias - self.mean.astype(np.float64) @ scaled
        return ((scaled.astype(np.float32), shifted.astype(np.float32)), *rest)

    @cached_property
    def flat(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """:attr:`folded` in one row, each weight before its bias, and the widths on the way."""
        parts = [part.ravel() for layer in self.folded for part in layer]
        widths = [len(self.folded[0][0]), *(len(bias) for _, bias in self.folded)]
        return np.concatenate(parts), np.array(widths, np.int64)

    @property
    def parameter(self) -> float:
        """The decision parameter in force: ``rate`` of a survival policy, else ``threshold``."""
        return self.rate if self.kind == "survival" else self.threshold


def frequency_policy(scope: str, threshold: float = 2.0) -> Policy:
    """Version 0 of a scope: verify the cache draft when its counted score reaches ``threshold``."""
    return Policy(scope=scope, version=0, threshold=threshold, kind="frequency")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a policy expects of n drafts.

    ``expected`` [n] is the accepted length of the cache draft in tokens, at least 0 and at most its
    length. ``model`` [n] is the expected accepted length of a model draft in the same state. Of
    the kind ``survival`` alone: ``curves`` [n, w], the survival of the cache draft.
    """

    expected: FloatArray
    lengths: NDArray[np.int32]
    model: FloatArray
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


def estimate(policy: Policy, features: FloatArray, model_len: int) -> Estimate:
    """What ``policy`` expects of the drafts described by ``features`` float32 [n, features].

    Args:
        model_len: tokens of a model draft; 0 without a model drafter.
    """
    lengths = features[:, _DRAFT_LEN]
    whole = lengths.astype(np.int32)
    if policy.kind == "survival":
        outputs = network(policy, features)
        curves = survival(outputs[:, :BUCKETS], whole)
        model = chain_yield(outputs[:, BUCKETS], model_len if policy.use_model else 0)
        return Estimate(curves.sum(axis=1), whole, model, curves)
    raw = features[:, _SCORE] if policy.kind == "frequency" else network(policy, features)[:, 0]
    expected = np.minimum(np.maximum(raw, 0.0), lengths)
    payoff = policy.model_payoff if model_len and policy.use_model else 0.0
    return Estimate(expected, whole, np.full(len(features), payoff, np.float32))


def predict(policy: Policy, features: FloatArray) -> FloatArray:
    """Expected accepted length [n], tokens, of the cache drafts with ``features`` [n, features]."""
    return estimate(policy, features, 0).expected


_SCORE: Final = FEATURES.index("score")
_DRAFT_LEN: Final = FEATURES.index("draft_len")


def decide_each(
    policy: Policy, estimated: Estimate, situation: Situation, batch: NDArray[np.integer]
) -> Choice:
    """Arm and draft length of n rows of different steps, each shared by ``batch`` [n] requests."""
    if policy.kind != "survival":
        return _threshold(policy, estimated, situation)
    assert estimated.curves is not None
    if not policy.use_model:
        situation = replace(situation, model_len=0)
    return choose_each(estimated.curves, estimated.model, batch, policy.rate, situation)


def _threshold(policy: Policy, estimated: Estimate, situation: Situation) -> Choice:
    k = situation.model_len if policy.use_model else 0
    taken = (estimated.expected >= policy.threshold) & (estimated.lengths > 0)
    arms = np.where(taken, CACHE, MODEL if k else NONE).astype(np.int8)
    return Choice(arms, np.where(taken, estimated.lengths, k).astype(np.int32))
