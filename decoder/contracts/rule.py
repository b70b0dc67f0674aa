"""The rate rule: what to verify so that the most tokens are committed a second.

A committed token is worth the time it would otherwise take: ``value = plain / (rate * batch)``,
where ``plain`` is the time of a step that verifies no draft and ``rate`` the tokens a request gets
done in such a time, the one decision parameter, tuned by the learner. A choice is worth
``value * (tokens committed) - (time of the step)``; maximising it maximises the long-run rate
(Dinkelbach's argument for ratios), and a threshold on the accepted length is the special case of
constant costs and a constant model draft.

:func:`choose_each` judges rows on their own, as the learner replays them, :func:`choose_one` is the
same for a request alone; :func:`choose_batch`
spends the verification budget of one step where it buys most and runs the drafter only if that pays
for the whole batch. On a batch of one they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.costs import MAX_TOKENS, CostTable
from decoder.contracts.survival import FloatArray

NONE, MODEL, CACHE = range(3)

Arms = NDArray[np.int8]
Lengths = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Choice:
    """Arm [n] and draft tokens to verify [n] of each row; for arm ``none`` those are 0."""

    arms: Arms
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice depends on beside the drafts.

    ``model_len`` is the length of a model draft, 0 without a model drafter; ``rate`` the tokens a
    request commits in the time of a plain step, None for the rate its policy was tuned to.
    """

    costs: CostTable
    model_len: int = 0
    rate: float | None = None


def choose_each(
    curves: FloatArray,
    model: FloatArray,
    batch: NDArray[np.integer],
    rate: float,
    situation: Situation,
) -> Choice:
    """The best choice of each of n independent rows.

    Args:
        curves: float32 [n, w] of ``survival``.
        model: float32 [n], expected accepted length of the model draft.
        batch: integers [n], requests that share the row's step, each as this one.
        rate: tokens a request commits in the time of a plain step.
    """
    n, width = curves.shape
    costs, k = situation.costs, situation.model_len
    plain = costs.dense[batch]
    value = plain / (rate * batch)
    steps = np.minimum(batch[:, None] + _FROM_ONE[: max(width, k)], len(costs.dense) - 1)
    extra = costs.dense[steps] - plain[:, None]
    gains = np.cumsum(curves, axis=1) * value[:, None] - extra[:, :width]
    best = np.zeros(n)
    lengths = np.zeros(n, np.int32)
    if width:
        top = gains.argmax(axis=1)
        best = np.maximum(gains[np.arange(n), top], 0.0)
        lengths = np.where(best > 0.0, top + 1, 0).astype(np.int32)
    arms = np.where(lengths > 0, CACHE, NONE).astype(np.int8)
    if k:
        drafting = np.array([costs.drafting(k, int(b)) / b for b in batch])
        gain = model * value - extra[:, k - 1] - drafting
        chosen = gain > best
        arms[chosen], lengths[chosen] = MODEL, k
    return Choice(arms, lengths)


def draft_length(yields: FloatArray, rate: float, situation: Situation, rows: int) -> int:
    """Tokens that the model drafter should make in a step, if it runs at all.

    It drafts alike for all who ask; who asks is those whom a draft of that length gains more than
    its verification.

    Args:
        yields: float32 [n, k], expected accepted lengths of drafts of 1 to k tokens.
        rows: requests in the step, at least n.

    Returns:
        a length in 1..k, and 0 where k is 0.
    """
    n, k = yields.shape
    costs = situation.costs
    plain = float(costs.dense[rows])
    value = plain / (rate * rows)
    drafting = [costs.drafting(j, rows) for j in range(1, k + 1)]
    verifying = [float(costs.dense[min(rows + j, MAX_TOKENS)]) - plain for j in range(1, k + 1)]
    if n == 1:
        gains = [
            value * float(y) - v - d for y, v, d in zip(yields[0], verifying, drafting, strict=True)
        ]
    else:
        each = yields * value - np.array(verifying)
        gains = (np.maximum(each, 0.0).sum(axis=0) - drafting).tolist()
    return 1 + gains.index(max(gains)) if k else 0


def choose_one(curve: FloatArray, model: float, rate: float, situation: Situation) -> Choice:
    """:func:`choose_each` for one request alone in its step, with ``curve`` float32 [w]."""
    costs, k, width = situation.costs, situation.model_len, len(curve)
    plain = float(costs.dense[1])
    value = plain / rate
    arm, length, best = NONE, 0, 0.0
    if width:
        gains = np.add.accumulate(curve, dtype=np.float64)
        gains *= value
        gains -= costs.dense[2 : 2 + width]
        top = gains.argmax().item()
        best = gains.item(top) + plain
        if best > 0.0:
            arm, length = CACHE, top + 1
        else:
            best = 0.0
    if k and model * value - (float(costs.dense[1 + k]) - plain) - costs.drafting(k, 1) > best:
        arm, length = MODEL, k
    return Choice(np.array([arm], np.int8), np.array([length], np.int32))


def choose_batch(
    curves: FloatArray, model: FloatArray, rate: float, situation: Situation, rows: int
) -> Choice:
    """One step's choices for n requests of a batch.

    Args:
        curves: float32 [n, w] of ``survival``; rows of zeros have no cache draft.
        model: float32 [n], expected accepted length of the model draft.
        rows: requests in the step, those that do not speculate included; at least n.
    """
    n, width = curves.shape
    costs, k = situation.costs, situation.model_len
    plain = costs.dense[rows]
    value = plain / (rate * rows)
    room = min(n * max(width, k), len(costs.dense) - 1 - rows)
    extra = costs.dense[rows : rows + room + 1] - plain
    lengths = _spend(curves, value, extra)
    arms = np.where(lengths > 0, CACHE, NONE).astype(np.int8)
    if not k or not n:
        return Choice(arms, lengths)
    # Rows join the drafter in the order in which they gain by it, the budget priced at the margin;
    # how many do is then decided with exact costs. Nobody and everybody are among the candidates.
    spent = int(lengths.sum())
    ahead = min(spent + k, room)
    price = (extra[ahead] - extra[spent]) / max(ahead - spent, 1)
    cached = np.where(_COLUMNS[:width] < lengths[:, None], curves, 0.0).sum(axis=1)
    gained = (model - cached) * value
    more = k - lengths
    order = np.argsort(more * price - gained, kind="stable")
    tokens = np.minimum(spent + np.cumsum(more[order]), room)
    totals = np.cumsum(gained[order]) - extra[tokens] - costs.drafting(k, rows)
    joined = int(totals.argmax())
    if totals[joined] > -extra[spent]:
        chosen = order[: joined + 1]
        arms[chosen], lengths[chosen] = MODEL, k
    return Choice(arms, lengths)


def _spend(curves: FloatArray, value: float, extra: NDArray[np.float64]) -> Lengths:
    """Tokens to verify [n] of cache drafts alone: the top survivals that are worth their time."""
    n = len(curves)
    if not curves.size or len(extra) < 2:
        return np.zeros(n, np.int32)
    ranked = np.sort(curves, axis=None)[::-1][: len(extra) - 1]
    gains = np.cumsum(ranked, dtype=np.float64) * value - extra[1 : len(ranked) + 1]
    best = int(gains.argmax())
    if gains[best] <= 0.0 or ranked[best] <= 0.0:
        return np.zeros(n, np.int32)
    above = (curves > ranked[best]).sum(axis=1, dtype=np.int32)
    ties = (curves == ranked[best]).sum(axis=1, dtype=np.int32)
    left = best + 1 - int(above.sum())
    lengths: Lengths = above + np.clip(left - (np.cumsum(ties) - ties), 0, ties)
    return lengths.astype(np.int32)


_FROM_ONE: Final = np.arange(1, 4097)
_COLUMNS: Final = np.arange(4096)
