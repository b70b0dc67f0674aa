"""Feature vectors of a batch of cache drafts (paper, Table 9), in the order of ``FEATURES``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log1p

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.features import NUM_FEATURES, RECENT, TOKEN_CLASSES
from decoder.drafting.suffix import CacheDraft

FloatArray = NDArray[np.float32]
_SCALARS = NUM_FEATURES - 2 * len(TOKEN_CLASSES)
RECENT_CYCLES = 16
"""Cycles over which the cache-selection rate is taken."""


@dataclass(slots=True)
class History:
    """What a request has shown so far. Holds only labels already resolved: no leak."""

    payoffs: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    cache_cycles: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_CYCLES))


@dataclass(frozen=True, slots=True)
class DraftState:
    """A cache draft in the state it was proposed in. Lengths in tokens."""

    draft: CacheDraft
    prompt_len: int
    generated_len: int
    allowed_len: int  # output tokens the request may make
    streak: int  # longest match among its unresolved drafts
    history: History


def featurize(states: Sequence[DraftState], table: FloatArray) -> FloatArray:
    """Feature matrix of ``states``.

    Args:
        table: float32 [vocabulary, classes] of :func:`token_class_table`.

    Returns:
        float32 [len(states), features].
    """
    out = np.empty((len(states), NUM_FEATURES), dtype=np.float32)
    for row, state in zip(out, states, strict=True):
        draft, payoffs = state.draft, state.history.payoffs
        cycles = state.history.cache_cycles
        count = len(payoffs)
        row[:_SCALARS] = (
            draft.score,
            draft.match_len,
            len(draft.tokens),
            draft.probs[-1],
            log1p(state.prompt_len),
            log1p(state.generated_len),
            state.generated_len / max(state.allowed_len, 1),
            sum(cycles) / len(cycles) if cycles else 0.0,
            payoffs[-1] if count > 0 else 0.0,
            payoffs[-2] if count > 1 else 0.0,
            payoffs[-3] if count > 2 else 0.0,
            sum(payoffs) / count if count else 0.0,
            max(payoffs, default=0),
            state.streak,
        )
        classes = table[draft.tokens]
        row[_SCALARS : _SCALARS + classes.shape[1]] = classes.mean(axis=0)
        row[_SCALARS + classes.shape[1] :] = classes[0]
    return out
