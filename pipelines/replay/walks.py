"""What any choice of arms comes to, read off the states of every position.

A cycle at position ``p`` that accepts ``a`` draft tokens leads to ``p + a + 1``. With the accepted
length of both arms known at every position, a way of choosing is a walk through the output, and no
draft has to be made again. For choices that depend on the draft alone this is exact; it tunes
thresholds and gives the hindsight oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.features import FEATURES
from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import CACHE, MODEL, NONE
from pipelines.replay.model_arm import model_acceptance
from pipelines.replay.states import States
from pipelines.replay.tally import Tally
from pipelines.replay.traces import Trace

GRID: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0,
               20.0, 24.0, 32.0, 48.0, float("inf"))  # fmt: skip
"""Thresholds tried, in tokens: from always to never."""
SCORE: Final = FEATURES.index("score")
MATCH: Final = FEATURES.index("match_len")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Field:
    """Both arms at every position of some outputs, end to end; position 0 starts no cycle.

    ``cache`` and ``model`` are accepted lengths, ``cache_len`` and ``model_len`` what is verified
    for them; a length of 0 means that there is no such draft. ``row`` is the row of the position's
    state, -1 without a cache draft.
    """

    begins: Ints  # [outputs + 1], where each begins
    row: Ints  # [n]
    cache: Ints  # [n]
    cache_len: Ints  # [n]
    model: Ints  # [n]
    model_len: Ints  # [n]
    costs: CostTable


def field_of(
    traces: Sequence[Trace],
    states: States,
    model_mean: float | None,
    model_len: int,
    costs: CostTable = NOMINAL,
) -> Field:
    """Lay out ``states``, those of every position of ``traces``.

    Args:
        model_len: tokens of a model draft.
    """
    begins = np.cumsum([0, *(len(t.output) for t in traces)])
    n = int(begins[-1])
    row = np.full(n, -1, np.int64)
    at = begins[states.trace] + states.position
    row[at] = np.arange(len(states))
    cache, cache_len = np.zeros(n, np.int64), np.zeros(n, np.int64)
    cache[at], cache_len[at] = states.rows.accepted, states.rows.draft_len
    accepts = [model_acceptance(t, model_mean) for t in traces]
    room = [np.minimum(t.allowed - np.arange(len(t.output)) - 1, model_len) for t in traces]
    lengths = np.concatenate([*room, np.zeros(0, np.int64)]).astype(np.int64)
    model = np.concatenate([*accepts, np.zeros(0, np.int64)]).astype(np.int64)
    return Field(begins, row, cache, cache_len, np.minimum(model, lengths), lengths, costs)


def without_model(field: Field) -> Field:
    """The same outputs decoded with no model drafter."""
    nothing = np.zeros_like(field.model)
    return replace(field, model=nothing, model_len=nothing)


def shorter(field: Field, most: int) -> Field:
    """The same outputs with model drafts of at most ``most`` tokens."""
    model, length = np.minimum(field.model, most), np.minimum(field.model_len, most)
    return replace(field, model=model, model_len=length)


def arms_at(field: Field, values: NDArray[np.float32], threshold: float) -> NDArray[np.int8]:
    """Arm at every position [n]: the cache where its state's value reaches ``threshold``."""
    other = np.where(field.model_len > 0, MODEL, NONE)
    reach = np.zeros(len(field.row), np.bool_)
    drafted = field.row >= 0
    reach[drafted] = values[field.row[drafted]] >= threshold
    return np.where(reach, CACHE, other).astype(np.int8)


def oracle(field: Field) -> tuple[NDArray[np.int8], Ints]:
    """The hindsight choice at every position: arm [n] and draft tokens verified [n].

    The arm, and for the cache the length, that commits most for its time in this cycle. It knows
    where a draft breaks off and verifies no further.
    """
    dense = field.costs.dense
    drafting = np.array([field.costs.drafting(k, 1) for k in range(field.model_len.max() + 1)])
    none = np.full(len(field.row), 1.0 / dense[1])
    model = (1.0 + field.model) / (dense[1 + field.model_len] + drafting[field.model_len])
    cache = (1.0 + field.cache) / dense[1 + field.cache]
    arms = np.stack([none, model, cache]).argmax(axis=0).astype(np.int8)
    verified = np.select([arms == CACHE, arms == MODEL], [field.cache, field.model_len], 0)
    return arms, verified.astype(np.int64)


def walk(field: Field, arms: NDArray[np.int8], verified: Ints | None = None) -> Tally:
    """Decode by ``arms`` [n].

    Args:
        verified: draft tokens verified [n], at least what is accepted; whole drafts by default.
    """
    if verified is None:
        verified = np.select([arms == CACHE, arms == MODEL], [field.cache_len, field.model_len], 0)
    gain = np.select([arms == CACHE, arms == MODEL], [field.cache, field.model], 0)
    ends = np.repeat(field.begins[1:], np.diff(field.begins))
    position = np.arange(len(arms))
    following = np.minimum(position + 1 + gain, ends).tolist()
    visited: list[int] = []
    for begin, end in zip(field.begins[:-1].tolist(), field.begins[1:].tolist(), strict=True):
        at = begin + 1
        while at < end:
            visited.append(at)
            at = following[at]
    here = np.array(visited, np.int64)
    # A draft of no tokens is a cycle that verifies none.
    arm = np.where(verified[here] > 0, arms[here], NONE)
    time = field.costs.dense[1 + verified[here]].sum()
    for k, n in zip(*np.unique(verified[here][arm == MODEL], return_counts=True), strict=True):
        time += field.costs.drafting(int(k), 1) * n
    committed = np.array(following, np.int64)[here] - here
    accepted = np.minimum(gain[here], committed)
    cycles, drafts = np.bincount(arm, minlength=3), np.bincount(arm, accepted, 3)
    return Tally(
        len(here),
        int(committed.sum()),
        float(time),
        (int(cycles[NONE]), int(cycles[MODEL]), int(cycles[CACHE])),
        (int(drafts[NONE]), int(drafts[MODEL]), int(drafts[CACHE])),
    )


def tune(field: Field, values: NDArray[np.float32]) -> float:
    """The threshold of :data:`GRID` with the highest rate; among equals the highest."""
    rates = [walk(field, arms_at(field, values, t)).rate for t in GRID]
    best = max(rates)
    return max(t for t, rate in zip(GRID, rates, strict=True) if rate == best)
