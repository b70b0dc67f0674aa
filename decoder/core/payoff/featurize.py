"""Feature vectors of a batch of cache drafts, in the order of ``FEATURES``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import MATRIX, WHOLE, WHOLES, compiled
from decoder.contracts.features import FEATURES, LOGGED, NUM_FEATURES, TOKEN_CLASSES
from decoder.core.payoff.memory import History, Keys, TenantMemory
from decoder.drafting.drafts import CacheDraft

FloatArray = NDArray[np.float32]
_SCALARS: Final = NUM_FEATURES - 2 * len(TOKEN_CLASSES)
_PACKED: Final = Struct(f"{_SCALARS}f")
_ROW_BYTES: Final = 4 * NUM_FEATURES
_DRAFT_LEN: Final = FEATURES.index("draft_len")


class DraftState(NamedTuple):
    """A cache draft in the state it was proposed in. Lengths in tokens."""

    draft: CacheDraft
    prompt_len: int
    generated_len: int
    allowed_len: int  # output tokens the request may make
    streak: int  # longest match among its unresolved drafts
    history: History
    tenant: TenantMemory
    keys: Keys  # of the tenant's memory


def featurize(states: Sequence[DraftState], table: FloatArray) -> FloatArray:
    """Feature matrix of ``states``.

    Args:
        table: float32 [vocabulary, classes] of :func:`token_class_table`.

    Returns:
        float32 [len(states), features].
    """
    n = len(states)
    out = np.empty((n, NUM_FEATURES), dtype=np.float32)
    for row, state in enumerate(states):
        _PACKED.pack_into(out.data, row * _ROW_BYTES, *_scalars(state))
    if n == 1:
        tokens = states[0].draft.tokens
    else:
        tokens = list(chain.from_iterable(state.draft.tokens for state in states))
    _complete(out, np.array(tokens, np.int64), table, len(LOGGED), _DRAFT_LEN)
    return out


@compiled((MATRIX, WHOLES, MATRIX, WHOLE, WHOLE))
def _complete(
    out: FloatArray, tokens: NDArray[np.int64], table: FloatArray, logged: int, draft_len: int
) -> None:
    """Take the logarithms and fill in the token classes. Mutates ``out``.

    Args:
        tokens: int64 [sum of lengths], all drafts one after another; ids behind the vocabulary have
            no class.
        logged: columns that are logarithms; they come first.
        draft_len: the column that says how many of ``tokens`` are a row's.
    """
    classes = table.shape[1]
    shares = out.shape[1] - 2 * classes
    begin = 0
    for row in range(len(out)):
        length = int(out[row, draft_len])
        for column in range(logged):
            out[row, column] = np.log1p(out[row, column])
        out[row, shares:] = 0.0
        for place in range(begin, min(begin + length, len(tokens))):
            token = tokens[place]
            if 0 <= token < len(table):
                for c in range(classes):
                    out[row, shares + c] += table[token, c]
                    if place == begin:
                        out[row, shares + classes + c] = table[token, c]
        for c in range(classes):
            out[row, shares + c] /= length
        begin += length


def _scalars(state: DraftState) -> tuple[float, ...]:
    draft, history, tenant = state.draft, state.history, state.tenant
    probs, score, match, generated = draft.probs, draft.score, draft.match_len, state.generated_len
    length, agreement, rival = len(probs), draft.agreement, draft.rival
    if rival is None:
        theirs, their_match, their_len, their_first, disagree = 0.0, 0.0, 0.0, 0.0, False
    else:
        theirs, their_match, their_len = rival.score, rival.match_len, len(rival.probs)
        their_first, disagree = rival.probs[0], not agreement
    return (
        score,
        match,
        length,
        theirs,
        their_match,
        their_len,
        agreement,
        state.prompt_len,
        generated,
        max(generated - history.broke_at, 0),
        score,
        match,
        length,
        score / length,
        probs[-1],
        probs[0],
        probs[1] if length > 1 else 0.0,
        probs[3] if length > 3 else 0.0,
        probs[7] if length > 7 else 0.0,
        probs[15] if length > 15 else 0.0,
        their_first,
        agreement / length,
        disagree,
        draft.local,
        generated / max(state.allowed_len, 1),
        history.cache_share,
        *history.payoff_features,
        state.streak,
        history.first,
        history.fast,
        history.slow,
        tenant.first,
        tenant.log_payoff,
        history.model,
        *tenant.recall(state.keys),
    )
