"""The loops of a choice, compiled: on arrays this small, nearly all of numpy's time is the price of
calling it.

A worker's step runs them, and the learner, who replays thousands of rows; where there is no numba
they run as they are written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    FIXED,
    FLOATS,
    MATRIX,
    REAL,
    REALS,
    REALS_3,
    WHOLE,
    WHOLES,
    compilable,
    compiled,
)
from decoder.contracts.features import FloatArray
from decoder.policy.pricing import drafting_time, part, token_value, verifying
from decoder.policy.rule import CACHE, MODEL, NONE, Arms, Lengths

__all__ = [
    "by_survival", "choose_rows", "curves_of", "draft_length", "drafting_time", "outputs_of",
    "part", "share_out", "token_value", "verifying", "yields_of_places",
]  # fmt: skip

compilable(verifying, drafting_time, token_value, part)


@compiled((MATRIX, FLOATS, WHOLES))
def outputs_of(features: FloatArray, weights: FloatArray, widths: NDArray[np.int64]) -> FloatArray:
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


@compiled((MATRIX, WHOLES, WHOLES, WHOLES, WHOLE))
def curves_of(
    outputs: FloatArray,
    draft_lens: NDArray[np.int64],
    owners: NDArray[np.int64],
    bucket_of: NDArray[np.int64],
    n: int,
) -> FloatArray:
    """Chance that each of m drafts survives through each of its positions.

    The network gives one logit a bucket: the log-odds that a draft which survived so far breaks off
    at a position of that bucket. Near positions have buckets of their own, far ones share. The sum
    of a row is the accepted length to expect, and the same holds for every truncation.

    Args:
        outputs: float32 [m, buckets or more].
        draft_lens: int64 [m], tokens of each draft.
        owners: int64 [m], the row that each has.
        bucket_of: int64 [positions], the bucket of each.

    Returns:
        float32 [n, longest], never rising along a row, 0 behind a draft's end.
    """
    width = 0
    for r in range(len(owners)):
        width = max(width, draft_lens[r])
    width = min(width, len(bucket_of))
    curves = np.zeros((n, width), np.float32)
    for r in range(len(owners)):
        alive, bucket, holds = 1.0, -1, 1.0
        for j in range(min(draft_lens[r], width)):
            if bucket_of[j] != bucket:
                bucket = bucket_of[j]
                holds = 1.0 / (1.0 + np.exp(outputs[r, bucket]))
            alive *= holds
            curves[owners[r], j] = alive
    return curves


@compiled((REALS, WHOLE))
def yields_of_places(odds: NDArray[np.float64], most: int) -> FloatArray:
    """Expected accepted lengths of model drafts of 1 to ``most`` tokens: float32 [most]."""
    yields = np.empty(most, np.float32)
    total, alive = 0.0, 1.0
    for place in range(most):
        alive /= 1.0 + np.exp(-odds[place])
        total += alive
        yields[place] = total
    return yields


@compiled()
def draft_length(
    yields: FloatArray,
    value: float,
    rows: int,
    room: int,
    dense: NDArray[np.float64],
    drafting: tuple[float, float, float],
) -> int:
    """Tokens that the model drafter should make in a step, if it runs at all: 1 to k.

    It drafts alike for all who ask; who asks are those from whom most is expected, as many as pay.

    Args:
        yields: float32 [n, k], expected accepted lengths of drafts of 1 to k tokens.
        value: of a committed token, in units of ``dense``.
        rows: tokens that the step runs through the target whatever is verified.
        room: draft tokens of all requests together.
    """
    most = yields.shape[1]
    order = np.argsort(-yields[:, most - 1])
    plain = verifying(rows, dense)
    found, best = 1, -np.inf
    for k in range(1, most + 1):
        gained, drafts = 0.0, 0
        least = plain + drafting_time(k, rows, drafting)
        for i in order:
            gained += yields[i, k - 1] * value
            drafts += k
            if drafts > room:
                break
            gain = gained - (verifying(rows + drafts, dense) + least - 2 * plain)
            if gain > best:
                found, best = k, gain
    return found


@compiled()
def spend(
    curves: FloatArray, value: float, rows: int, room: int, dense: NDArray[np.float64]
) -> Lengths:
    """Tokens to verify [n] of cache drafts alone: the top survivals that are worth their time.

    ``rows`` are the tokens that the step runs through the target whatever is verified of them.
    """
    n, width = curves.shape
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
    for place in range(min(count, room)):
        gained += ranked[place]
        gain = gained * value - (verifying(rows + place + 1, dense) - plain)
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


@compiled()
def share_out(
    curves: FloatArray,
    model: FloatArray,
    k: int,
    value: float,
    rows: int,
    room: int,
    dense: NDArray[np.float64],
    drafting: tuple[float, float, float],
) -> tuple[Arms, Lengths, float]:
    """One step's arms [n] and lengths [n] under a shared budget, and the time that its model drafts
    are worth beyond the best without any.

    Args:
        curves: float32 [n, w] of survivals; rows of zeros have no cache draft.
        model: float32 [n], expected accepted length of a model draft of ``k`` tokens; 0 where none
            can be made.
        value: of a committed token, in units of ``dense``.
        rows: tokens that the step runs through the target whatever is verified; at least n.
        room: draft tokens of all requests together.
    """
    n, width = curves.shape
    room = min(n * max(width, k), room)
    plain = verifying(rows, dense)
    lengths = spend(curves, value, rows, room, dense)
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
    gains = np.empty(n, np.float64)
    loss = np.empty(n, np.float64)
    for i in range(n):
        cached = 0.0
        for j in range(lengths[i]):
            cached += curves[i, j]
        gains[i] = (model[i] - cached) * value
        loss[i] = (k - lengths[i]) * price - gains[i] if model[i] > 0.0 else np.inf
    order = np.argsort(loss, kind="mergesort")
    alone = plain - verifying(rows + spent, dense)
    tokens, gained, best, joined = spent, 0.0, alone, 0
    for place in range(n):
        if loss[order[place]] == np.inf:
            break
        gained += gains[order[place]]
        tokens += k - lengths[order[place]]
        time = verifying(rows + tokens, dense) - plain + drafting_time(k, rows, drafting)
        if gained - time > best and tokens <= room:
            best, joined = gained - time, place + 1
    for place in range(joined):
        arms[order[place]] = MODEL
        lengths[order[place]] = k
    return arms, lengths, best - alone


@compiled(
    (
        MATRIX, FLOATS, WHOLES, WHOLES, WHOLE, WHOLES, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE,
        REALS, REAL, FIXED, REALS_3, WHOLES,
    )
)  # fmt: skip
def by_survival(
    features: FloatArray,
    weights: FloatArray,
    widths: NDArray[np.int64],
    owners: NDArray[np.int64],
    draft_len: int,
    bucket_of: NDArray[np.int64],
    n: int,
    rows: int,
    beside: int,
    most: int,
    room: int,
    odds: NDArray[np.float64],
    rate: float,
    dense: NDArray[np.float64],
    drafting: tuple[float, float, float],
    unread: NDArray[np.int64],
) -> tuple[Arms, Lengths, FloatArray, FloatArray, int, float]:
    """What a ``survival`` policy wants of a step; arguments as :func:`decoder.core.choice.choose`.

    Args:
        weights, widths: the flat form of the policy's network.
        most: tokens of a model draft at most.
        drafting: the three costs of :func:`drafting_time`.
        unread: which of the n requests have no model draft.

    Returns:
        arms and lengths [n], accepted lengths expected of cache and model drafts [n], tokens of
        every model draft, 0 where none pays, and the time that model drafts would be worth if all
        requests could have one.
    """
    value = token_value(rows, rate, dense)
    drafting = (drafting[0], drafting[1] + drafting[2] * rows, 0.0)
    rows += beside
    outputs = outputs_of(features, weights, widths)
    draft_lens = features[:, draft_len].astype(np.int64)
    curves = curves_of(outputs, draft_lens, owners, bucket_of, n)
    expected = np.zeros(n, np.float32)
    for i in range(n):
        expected[i] = curves[i].sum()
    yields = np.empty((n, most), np.float32)
    yields[:] = yields_of_places(odds, most)
    k = draft_length(yields, value, rows, room, dense, drafting) if most else 0
    model = np.zeros(n, np.float32)
    if k:
        model[:] = yields[:, k - 1]
    arms, lengths, worth = share_out(curves, model, k, value, rows, room, dense, drafting)
    if most and len(unread):
        for i in unread:
            yields[i] = 0.0
        k = draft_length(yields, value, rows, room, dense, drafting)
        model[:] = yields[:, k - 1]
        arms, lengths, _ = share_out(curves, model, k, value, rows, room, dense, drafting)
    return arms, lengths, expected, model, k, worth


@compiled((MATRIX, FLOATS, WHOLES, REALS, WHOLE, FIXED, REALS_3))
def choose_rows(
    curves: FloatArray,
    model: FloatArray,
    batch: NDArray[np.int64],
    rates: NDArray[np.float64],
    k: int,
    dense: NDArray[np.float64],
    drafting: tuple[float, float, float],
) -> tuple[Arms, Lengths]:
    """Arms [n] and lengths [n] of rows on their own, each of a step of ``batch`` [n] requests that
    are all like it, by the ``rates`` [n] in force; the rest as :func:`share_out`."""
    n = len(batch)
    arms, lengths = np.zeros(n, np.int8), np.zeros(n, np.int32)
    for i in range(n):
        rows = batch[i]
        each = drafting[0] / rows, drafting[1] / rows + drafting[2], 0.0
        value = token_value(rows, rates[i], dense)
        mine, its = curves[i : i + 1], model[i : i + 1]
        found = share_out(mine, its, k, value, rows, 1 << 40, dense, each)
        arms[i], lengths[i] = found[0][0], found[1][0]
    return arms, lengths
