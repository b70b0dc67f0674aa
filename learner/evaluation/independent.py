"""A policy's decisions for recorded rows, each from a step of its own whose requests are all alike.

The functions are those that a worker's step runs: ``decoder.policy.loops``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoder.compiled import ConstantArray, Float32Matrix, entry_point
from decoder.contracts.bundle import Policy
from decoder.contracts.features import FEATURES, FloatArray
from decoder.policy.estimate import Estimate, network, survival
from decoder.policy.loops import Terms, share_out, token_value
from decoder.policy.pricing import CostTable, cost_share
from decoder.policy.rule import CACHE, MODEL, NONE, Arms, Lengths

ALONE: Final = np.dtype([("model", "f4"), ("batch_size", "i8"), ("rate", "f8")], align=True)
"""Inputs of an independent row: expected accepted length of a model draft, batch size of its step,
and the rate."""


class Choice(NamedTuple):
    """Arm and draft tokens to verify for each row, [..., n]; 0 tokens for arm ``none``."""

    arms: Arms
    lengths: Lengths


class Situation(NamedTuple):
    """Costs of independent rows, and the length of a model draft, 0 without a model drafter."""

    costs: CostTable
    model_len: int = 0


def estimate_each(policies: Sequence[Policy], features: FloatArray) -> Estimate:
    """:func:`estimate` for ``survival`` policies: ``expected`` [p, n], ``curves`` [p, n, w]."""
    draft_lens = features[:, FEATURES.index("draft_len")].astype(np.int32)
    logits = np.concatenate([network(policy, features) for policy in policies])
    curves = survival(logits, np.tile(draft_lens, len(policies)))
    curves = curves.reshape(len(policies), len(features), -1)
    return Estimate(curves.sum(axis=-1), draft_lens, curves)


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
    rows = np.empty(shape, ALONE)
    rows["model"], rows["batch_size"], rows["rate"] = model, batch, rate
    curves = np.require(estimated.curves.reshape(rows.size, width), np.float32, ("C", "W"))
    arms, lengths = choose_rows(curves, rows.reshape(-1), k, costs.dense, costs.prices)
    return Choice(arms.reshape(shape), lengths.reshape(shape))


@entry_point
def choose_rows(
    curves: Float32Matrix,
    rows: Annotated[NDArray[Any], ALONE],
    k: int,
    dense: ConstantArray,
    prices: tuple[float, float, float],
) -> tuple[Arms, Lengths]:
    """Arms [n] and lengths [n] of independent rows: each stands for a step of identical requests.
    The rest is as in :func:`share_out`."""
    n, model = len(rows), np.empty(1, np.float32)
    arms, lengths = np.zeros(n, np.int8), np.zeros(n, np.int32)
    for i in range(n):
        row, batch = rows[i], rows[i]["batch_size"]
        each = prices[0] / batch, prices[1] / batch + prices[2], 0.0
        model[0] = row["model"]
        terms = Terms(token_value(batch, row["rate"], dense), batch, 1 << 40, each)
        shared = share_out(curves[i : i + 1], model, k, terms, dense)
        arms[i], lengths[i] = shared[0][0], shared[1][0]
    return arms, lengths


def cost_shares(
    costs: CostTable,
    rows: ArrayLike,
    length: ArrayLike,
    drafts: ArrayLike,
    drafting: ArrayLike = 0.0,
    models: ArrayLike = 1,
    prefill: ArrayLike = 0,
) -> NDArray[np.float64]:
    """:func:`cost_share` with a cost table, float64 of the broadcast shape; tokens are rounded."""
    rows, length, drafts = (np.rint(n).astype(np.int64) for n in (rows, length, drafts))
    drafting, models, prefill = (np.asarray(n) for n in (drafting, models, prefill))
    shares: NDArray[np.float64] = cost_share(
        rows, length, drafts, drafting, models, prefill, costs.dense
    )
    return shares
