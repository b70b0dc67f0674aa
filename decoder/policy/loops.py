"""The loops of a choice, compiled: on arrays this small, nearly all of numpy's time is the price of
calling it.

A worker's step runs them, and the learner, who replays thousands of rows; where there is no numba
they run as they are written.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

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
from decoder.policy.pricing import drafting_time, part, token_value, verifying
from decoder.policy.rule import CACHE, CANDIDATE, MODEL, NONE, SITUATION, Arms, Lengths

__all__ = [
    "by_survival", "choose_rows", "curves_of", "draft_length", "drafting_time", "outputs_of",
    "part", "share_out", "token_value", "verifying", "yields_of_places",
]  # fmt: skip

compilable(verifying, drafting_time, token_value, part)

ALONE: Final = np.dtype([("model", "f4"), ("batch_size", "i8"), ("rate", "f8")], align=True)
"""What a row on its own depends on: accepted length expected of a model draft, requests that share
its step, and the rate in force."""


class Terms(NamedTuple):
    """What a step's tokens are worth and cost."""

    value: float  # of a committed token, in units of the cost table
    rows: int  # tokens that the step runs through the target whatever is verified
    budget: int  # draft tokens of all requests together
    prices: tuple[float, float, float]  # of drafting


@entry_point
def outputs_of(features: Float32Matrix, weights: Float32Array, widths: Int64Array) -> FloatArray:
    """Raw outputs of a network by the flat form of its policy: float32 [n, outputs]."""
    hidden = features
    at = 0
    some = np.empty(max(widths), np.int64)  # inputs that are not 0: half of what is behind a ReLU
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
            # Four at a time: a sum is read and written once for them, and added up in their order.
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
    """Chance that each of m drafts survives through each of its positions.

    The network gives one logit a bucket: the log-odds that a draft which survived so far breaks off
    at a position of that bucket. Near positions have buckets of their own, far ones share. The sum
    of a row is the accepted length to expect, and the same holds for every truncation.

    Args:
        outputs: float32 [m, buckets or more].
        draft_lens: int64 [m], tokens of each draft.
        owners: int64 [m], the row that each has.

    Returns:
        float32 [n, longest], never rising along a row, 0 behind a draft's end.
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
    for place in range(most):
        alive /= 1.0 + np.exp(-odds[place])
        total += alive
        yields[place] = total
    return yields


@compiled
def draft_length(yields: FloatArray, terms: Terms, dense: NDArray[np.float64]) -> int:
    """Tokens that the model drafter should make in a step, if it runs at all: 1 to k.

    It drafts alike for all who ask; who asks are those from whom most is expected, as many as pay.

    Args:
        yields: float32 [n, k], expected accepted lengths of drafts of 1 to k tokens.
        dense: of the cost table.
    """
    most, rows = yields.shape[1], terms.rows
    order = np.argsort(-yields[:, most - 1])
    plain = verifying(rows, dense)
    found, best = 1, -np.inf
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
                found, best = k, gain
    return found


@compiled
def spend(curves: FloatArray, terms: Terms, dense: NDArray[np.float64]) -> Lengths:
    """Tokens to verify [n] of cache drafts alone: the top survivals that are worth their time."""
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
    gained, best, bought = 0.0, 0.0, 0
    for place in range(min(count, terms.budget)):
        gained += ranked[place]
        gain = gained * terms.value - (verifying(rows + place + 1, dense) - plain)
        if gain > best:
            best, bought = gain, place + 1
    if not bought:
        return lengths
    # Which rows they belong to: all above the last one bought, and equals in the order of rows.
    last, left = ranked[bought - 1], bought
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
    """What each row [n] would gain by a model draft of ``k`` tokens in the place of the first
    ``lengths`` tokens of its cache draft, and what it would lose; ``terms`` are the value of a
    committed token and the price of one more verified."""
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
    """One step's arms [n] and lengths [n] under a shared budget, and the time that its model drafts
    are worth beyond the best without any.

    Args:
        curves: float32 [n, w] of survivals; rows of zeros have no cache draft.
        model: float32 [n], expected accepted length of a model draft of ``k`` tokens; 0 where none
            can be made.
        terms: of the step, whose ``rows`` are at least n.
        dense: of the cost table.
    """
    (n, width), rows = curves.shape, terms.rows
    room = min(n * max(width, k), terms.budget)
    plain = verifying(rows, dense)
    lengths = spend(curves, Terms(terms.value, rows, room, terms.prices), dense)
    arms = np.zeros(n, np.int8)
    for i in range(n):
        arms[i] = CACHE if lengths[i] else NONE
    if not k or not n:
        return arms, lengths, 0.0
    # Rows join the drafter in the order in which they gain by it, the budget priced at the margin;
    # how many do is then decided with exact costs. Nobody and everybody are among the candidates.
    spent = 0
    for i in range(n):
        spent += lengths[i]
    ahead = min(spent + k, room)
    price = verifying(rows + ahead, dense) - verifying(rows + spent, dense)
    price /= max(ahead - spent, 1)
    gains, loss = gains_of(curves, model, k, (terms.value, price), lengths)
    order = np.argsort(loss, kind="mergesort")
    alone = plain - verifying(rows + spent, dense)
    tokens, gained, best, joined = spent, 0.0, alone, 0
    for place in range(n):
        if loss[order[place]] == np.inf:
            break
        gained += gains[order[place]]
        tokens += k - lengths[order[place]]
        time = verifying(rows + tokens, dense) - plain + drafting_time(k, rows, terms.prices)
        if gained - time > best and tokens <= room:
            best, joined = gained - time, place + 1
    for place in range(joined):
        arms[order[place]] = MODEL
        lengths[order[place]] = k
    return arms, lengths, best - alone


@compiled
def expected_curves(
    network: tuple[FloatArray, NDArray[np.int64]], drafts: NDArray[Any], candidates: NDArray[Any]
) -> FloatArray:
    """Survival curves [n, w] of the requests of a step; of zeros where there is no cache draft."""
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
    situations: Annotated[NDArray[Any], SITUATION],
    odds: Float64Array,
    dense: ConstantArray,
) -> tuple[int, float]:
    """What a ``survival`` policy wants of a step. Fills ``wanted``, ``length``, ``expected`` and
    ``model`` of ``candidates``.

    Args:
        network: weights and widths, the flat form of the policy's.
        drafts: features of the cache drafts.
        situations: [1]
        odds: log-odds that a model draft's token of each place is accepted.
        dense: of the cost table in force.

    Returns:
        tokens of every model draft, 0 where none pays, and the time that model drafts would be
        worth if all requests could have one.
    """
    situation, n = situations[0], len(candidates)
    prices, most, batch = situation["prices"], situation["model_len"], situation["batch_size"]
    terms = Terms(
        token_value(batch, situation["rate"], dense), batch + situation["prefill_tokens"],
        situation["budget"], (prices[0], prices[1] + prices[2] * batch, 0.0),
    )  # fmt: skip
    curves = expected_curves(network, drafts, candidates)
    unable = candidates["unable"].any()
    yields = np.empty((n, most), np.float32)
    yields[:] = yields_of_places(odds, most)
    k = draft_length(yields, terms, dense) if most else 0
    model = np.zeros(n, np.float32)
    if k:
        model[:] = yields[:, k - 1]
    arms, lengths, worth = share_out(curves, model, k, terms, dense)
    if most and unable:
        for i in range(n):
            if candidates[i]["unable"]:
                yields[i] = 0.0
        k = draft_length(yields, terms, dense)
        model[:] = yields[:, k - 1]
        arms, lengths, _ = share_out(curves, model, k, terms, dense)
    for i in range(n):
        candidate = candidates[i]
        candidate["wanted"], candidate["length"] = arms[i], lengths[i]
        candidate["expected"], candidate["model"] = curves[i].sum(), model[i]
    return k, worth


@entry_point
def choose_rows(
    curves: Float32Matrix,
    rows: Annotated[NDArray[Any], ALONE],
    k: int,
    dense: ConstantArray,
    prices: tuple[float, float, float],
) -> tuple[Arms, Lengths]:
    """Arms [n] and lengths [n] of rows on their own, each of a step of requests that are all like
    it; the rest as :func:`share_out`."""
    n, model = len(rows), np.empty(1, np.float32)
    arms, lengths = np.zeros(n, np.int8), np.zeros(n, np.int32)
    for i in range(n):
        row, batch = rows[i], rows[i]["batch_size"]
        each = prices[0] / batch, prices[1] / batch + prices[2], 0.0
        model[0] = row["model"]
        terms = Terms(token_value(batch, row["rate"], dense), batch, 1 << 40, each)
        found = share_out(curves[i : i + 1], model, k, terms, dense)
        arms[i], lengths[i] = found[0][0], found[1][0]
    return arms, lengths
