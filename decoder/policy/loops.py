"""Compiled loops of the decision: on arrays this small, numpy's call overhead dominates.

A worker runs them in each step, a learner over thousands of replayed rows. Without numba they run
as plain Python.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    ConstantArray,
    Float32Array,
    Float32Matrix,
    Float64Array,
    Int64Array,
    compilable,
    compiled,
    entry_point,
)
from decoder.contracts.bundle import BUCKET_OF
from decoder.contracts.features import FEATURE_ROW, NUM_FEATURES, FloatArray
from decoder.policy.pricing import cost_share, drafting_time, token_value, verifying
from decoder.policy.rule import CACHE, CANDIDATE, MODEL, NONE, STEP_INPUTS, Arms, Lengths

__all__ = ["cost_share", "drafting_time", "token_value", "verifying"]

compilable(verifying, drafting_time, token_value, cost_share)


class Terms(NamedTuple):
    """Value and cost of a step's tokens."""

    value: float  # of a committed token, in units of the cost table
    rows: int  # tokens that the step runs through the target without drafts
    budget: int  # draft tokens of all requests together
    prices: tuple[float, float, float]  # drafting coefficients


@entry_point
def outputs_of(features: Float32Matrix, weights: Float32Array, widths: Int64Array) -> FloatArray:
    """Forward pass of a policy's network from its flat weights: float32 [n, outputs]."""
    hidden = features
    at = 0
    some = np.empty(max(widths), np.int64)  # non-zero inputs: about half of them after a ReLU
    for layer in range(len(widths) - 1):
        inputs, outputs = widths[layer], widths[layer + 1]
        bias = weights[at + inputs * outputs : at + (inputs + 1) * outputs]
        result = np.empty((len(features), outputs), np.float32)
        for r in range(len(features)):
            row = result[r]
            row[:] = bias
            count = 0
            for i in range(inputs):
                some[count] = i
                count += hidden[r, i] != 0.0
            # Four inputs at a time: one load and store of each sum, added in input order.
            for first in range(0, count - 3, 4):
                a, b, c, d = some[first], some[first + 1], some[first + 2], some[first + 3]
                va, vb, vc, vd = hidden[r, a], hidden[r, b], hidden[r, c], hidden[r, d]
                wa, wb = weights[at + a * outputs :], weights[at + b * outputs :]
                wc, wd = weights[at + c * outputs :], weights[at + d * outputs :]
                for o in range(outputs):
                    row[o] = row[o] + va * wa[o] + vb * wb[o] + vc * wc[o] + vd * wd[o]
            for left in range(count - count % 4, count):
                value, weight = hidden[r, some[left]], weights[at + some[left] * outputs :]
                for o in range(outputs):
                    row[o] += value * weight[o]
            if layer < len(widths) - 2:
                for o in range(outputs):
                    result[r, o] = max(result[r, o], np.float32(0.0))
        hidden = result
        at += (inputs + 1) * outputs
    return hidden


@entry_point
def curves_of(
    outputs: Float32Matrix, draft_lens: Int64Array, owners: Int64Array, n: int
) -> FloatArray:
    """Survival curves of m drafts from discrete-time hazards.

    The network outputs one logit per bucket of positions: the log-odds that a draft which survived
    so far is rejected at a position of that bucket. Early positions have buckets of their own, late
    ones share. The sum of a row is the expected accepted length; so is that of any truncation.

    Args:
        outputs: [m, buckets or more].
        owners: [m], the result row of each draft.

    Returns:
        float32 [n, longest], non-increasing along a row, 0 after a draft's end.
    """
    width = 0
    for r in range(len(owners)):
        width = max(width, draft_lens[r])
    width = min(width, len(BUCKET_OF))
    curves = np.zeros((n, width), np.float32)
    for r in range(len(owners)):
        alive, bucket, holds = 1.0, -1, 1.0
        for j in range(min(draft_lens[r], width)):
            if BUCKET_OF[j] != bucket:
                bucket = BUCKET_OF[j]
                holds = 1.0 / (1.0 + np.exp(outputs[r, bucket]))
            alive *= holds
            curves[owners[r], j] = alive
    return curves


@entry_point
def yields_of_places(odds: Float64Array, most: int) -> FloatArray:
    """Expected accepted lengths of model drafts of 1 to ``most`` tokens: float32 [most]."""
    yields = np.empty(most, np.float32)
    total, alive = 0.0, 1.0
    for position in range(most):
        alive /= 1.0 + np.exp(-odds[position])
        total += alive
        yields[position] = total
    return yields


@compiled
def draft_length(yields: FloatArray, terms: Terms, dense: NDArray[np.float64]) -> int:
    """Best length of the step's model drafts, if the drafter runs at all: 1 to k tokens.

    All model drafts of a step have the same length. The requests with the highest expected accepted
    length get one, as many as pay. ``yields`` [n, k] are those of drafts of 1 to k tokens.
    """
    most, rows = yields.shape[1], terms.rows
    order = np.argsort(-yields[:, most - 1])
    plain = verifying(rows, dense)
    best_k, best = 1, -np.inf
    for k in range(1, most + 1):
        gained, drafts = 0.0, 0
        least = plain + drafting_time(k, rows, terms.prices)
        for i in order:
            gained += yields[i, k - 1] * terms.value
            drafts += k
            if drafts > terms.budget:
                break
            gain = gained - (verifying(rows + drafts, dense) + least - 2 * plain)
            if gain > best:
                best_k, best = k, gain
    return best_k


@compiled
def spend(curves: FloatArray, terms: Terms, dense: NDArray[np.float64]) -> Lengths:
    """Tokens to verify [n] with cache drafts only: the likeliest ones that are worth their time."""
    (n, width), rows = curves.shape, terms.rows
    lengths = np.zeros(n, np.int32)
    likely = np.empty(n * width, np.float32)
    count = 0
    for i in range(n):
        for j in range(width):
            if curves[i, j] > 0.0:
                likely[count] = curves[i, j]
                count += 1
    ranked = likely[:count]
    if n > 1:
        ranked = -np.sort(-ranked)
    plain = verifying(rows, dense)
    gained, best, chosen = 0.0, 0.0, 0
    for rank in range(min(count, terms.budget)):
        gained += ranked[rank]
        gain = gained * terms.value - (verifying(rows + rank + 1, dense) - plain)
        if gain > best:
            best, chosen = gain, rank + 1
    if not chosen:
        return lengths
    # Assign them to rows: all above the last one chosen, then ties in row order.
    last, left = ranked[chosen - 1], chosen
    for i in range(n):
        for j in range(width):
            if curves[i, j] <= last:
                break
            lengths[i] += 1
            left -= 1
    for i in range(n):
        while left and lengths[i] < width and curves[i, lengths[i]] == last:
            lengths[i] += 1
            left -= 1
    return lengths


@compiled
def gains_of(
    curves: FloatArray, model: FloatArray, k: int, terms: tuple[float, float], lengths: Lengths
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gain of each row [n] from a model draft of ``k`` tokens instead of the first ``lengths``
    tokens of its cache draft, and its net loss. ``terms`` are the value of a committed token and
    the price of one more verified token."""
    n, (value, price) = len(curves), terms
    gains, loss = np.empty(n, np.float64), np.empty(n, np.float64)
    for i in range(n):
        cached = 0.0
        for j in range(lengths[i]):
            cached += curves[i, j]
        gains[i] = (model[i] - cached) * value
        loss[i] = (k - lengths[i]) * price - gains[i] if model[i] > 0.0 else np.inf
    return gains, loss


@compiled
def share_out(
    curves: FloatArray, model: FloatArray, k: int, terms: Terms, dense: NDArray[np.float64]
) -> tuple[Arms, Lengths, float]:
    """Arms [n] and lengths [n] of one step under a shared budget, and the gain in time of its best
    use of model drafts over none.

    Args:
        curves: [n, w], survival; rows of zeros have no cache draft.
        model: [n], expected accepted length of a model draft of ``k`` tokens; 0 for none.
    """
    (n, width), rows = curves.shape, terms.rows
    budget = min(n * max(width, k), terms.budget)
    plain = verifying(rows, dense)
    lengths = spend(curves, Terms(terms.value, rows, budget, terms.prices), dense)
    arms = np.zeros(n, np.int8)
    for i in range(n):
        arms[i] = CACHE if lengths[i] else NONE
    if not k or not n:
        return arms, lengths, 0.0
    # Greedy: rows get a model draft in order of net loss at the marginal price of a token. Exact
    # costs then decide how many do, from none to all.
    spent = 0
    for i in range(n):
        spent += lengths[i]
    ahead = min(spent + k, budget)
    price = verifying(rows + ahead, dense) - verifying(rows + spent, dense)
    price /= max(ahead - spent, 1)
    gains, loss = gains_of(curves, model, k, (terms.value, price), lengths)
    order = np.argsort(loss, kind="mergesort")
    alone = plain - verifying(rows + spent, dense)
    tokens, gained, best, num_model = spent, 0.0, alone, 0
    for rank in range(n):
        if loss[order[rank]] == np.inf:
            break
        gained += gains[order[rank]]
        tokens += k - lengths[order[rank]]
        time = verifying(rows + tokens, dense) - plain + drafting_time(k, rows, terms.prices)
        if gained - time > best and tokens <= budget:
            best, num_model = gained - time, rank + 1
    for rank in range(num_model):
        arms[order[rank]] = MODEL
        lengths[order[rank]] = k
    return arms, lengths, best - alone


@compiled
def expected_curves(
    network: tuple[FloatArray, NDArray[np.int64]], drafts: NDArray[Any], candidates: NDArray[Any]
) -> FloatArray:
    """Survival curves [n, w] of a step's requests; zeros where there is no cache draft."""
    owners, draft_lens = np.empty(len(drafts), np.int64), np.empty(len(drafts), np.int64)
    for i in range(len(candidates)):
        draft = candidates[i]["draft"]
        if draft >= 0:
            owners[draft], draft_lens[draft] = i, int(drafts[draft]["draft_len"])
    features = drafts.view(np.float32).reshape((len(drafts), NUM_FEATURES))
    outputs = outputs_of(features, network[0], network[1])
    return curves_of(outputs, draft_lens, owners, len(candidates))


@entry_point
def by_survival(
    network: tuple[Float32Array, Int64Array],
    drafts: Annotated[NDArray[Any], FEATURE_ROW],
    candidates: Annotated[NDArray[Any], CANDIDATE],
    inputs: Annotated[NDArray[Any], STEP_INPUTS],
    odds: Float64Array,
    dense: ConstantArray,
) -> tuple[int, float]:
    """Decide a step by a ``survival`` policy with flat weights and layer widths ``network``. Fills
    ``policy_arm``, ``length``, ``expected`` and ``model`` of ``candidates``.

    Returns:
        length of every model draft, 0 where the engine has none, and the gain in time of model
        drafts if all requests could have one.
    """
    params, n = inputs[0], len(candidates)
    prices, most, batch = params["prices"], params["model_len"], params["batch_size"]
    terms = Terms(
        token_value(batch, params["rate"], dense), batch + params["prefill_tokens"],
        params["budget"], (prices[0], prices[1] + prices[2] * batch, 0.0),
    )  # fmt: skip
    curves = expected_curves(network, drafts, candidates)
    unable = candidates["unable"].any()
    yields = np.empty((n, most), np.float32)
    yields[:] = yields_of_places(odds, most)
    k = draft_length(yields, terms, dense) if most else 0
    model = np.zeros(n, np.float32)
    if k:
        model[:] = yields[:, k - 1]
    arms, lengths, gain = share_out(curves, model, k, terms, dense)
    if most and unable:
        for i in range(n):
            if candidates[i]["unable"]:
                yields[i] = 0.0
        k = draft_length(yields, terms, dense)
        model[:] = yields[:, k - 1]
        arms, lengths, _ = share_out(curves, model, k, terms, dense)
    for i in range(n):
        candidate = candidates[i]
        candidate["policy_arm"], candidate["length"] = arms[i], lengths[i]
        candidate["expected"], candidate["model"] = curves[i].sum(), model[i]
    return k, gain
