"""Feature vectors of a batch of cache drafts, in the order of ``FEATURES``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.features import LOGGED, NUM_FEATURES, TOKEN_CLASSES
from decoder.drafting.suffix import CacheDraft
from decoder.payoff.memory import History, Keys, TenantMemory

FloatArray = NDArray[np.float32]
_SCALARS: Final = NUM_FEATURES - 2 * len(TOKEN_CLASSES)
_LOGS: Final = len(LOGGED)
_FIRST: Final = _SCALARS + len(TOKEN_CLASSES)


@dataclass(frozen=True, slots=True)
class DraftState:
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
    if not n:
        return out
    if n == 1:
        out[0, :_SCALARS] = _scalars(states[0])
    else:
        out[:, :_SCALARS] = [_scalars(state) for state in states]
    logs = out[:, :_LOGS]
    np.log1p(logs, out=logs)
    if n == 1:
        classes = table.take(states[0].draft.tokens, axis=0)
        np.add.reduce(classes, axis=0, out=out[0, _SCALARS:_FIRST])
        out[0, _SCALARS:_FIRST] /= len(classes)
        out[0, _FIRST:] = classes[0]
        return out
    drafts = [state.draft.tokens for state in states]
    lengths = np.fromiter(map(len, drafts), np.int64, n)
    starts = np.cumsum(lengths) - lengths
    classes = table.take(list(chain.from_iterable(drafts)), axis=0)
    np.add.reduceat(classes, starts, axis=0, out=out[:, _SCALARS:_FIRST])
    out[:, _SCALARS:_FIRST] /= lengths[:, None]
    out[:, _FIRST:] = classes[starts]
    return out


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
