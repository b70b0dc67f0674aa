"""What may be drafted for the requests of a step, compiled: looked up, and described."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    HANDLE,
    MATRIX,
    REALS_3,
    WHOLE,
    WHOLES,
    YES,
    compiled,
)
from decoder.contracts.features import LOGGED, NUM_FEATURES, RECENT, TOKEN_CLASSES
from decoder.core import table as at
from decoder.core.payoff.memory import KINDS, Payoffs, hashed, payoffs_of, recall
from decoder.core.table import Table, table_of
from decoder.drafting.matches import BACK, draft, fetch, newest, scratch_for
from decoder.drafting.pages import ORDERS, PAGES, SHARED, pool_of

_SHARES: Final = NUM_FEATURES - 2 * len(TOKEN_CLASSES)
_RECALLED: Final = _SHARES - 3 * KINDS
_LOGGED: Final = len(LOGGED)


@compiled()
def room_of(table: Table, slot: int, longest: int) -> int:
    """Tokens of a draft for a request, at most ``longest``; one place is kept for the target's own.

    While fewer than its least tokens are written a draft does not reach them: vLLM forbids the end
    in that place, too, by the length before it.
    """
    request = table.requests[slot]
    if not request[at.SPECULATES] or request[at.ENDED]:
        return 0
    written = request[at.LENGTH] - request[at.PROMPT]
    left = min(request[at.MAX_TOKENS] - written, request[at.MAX_LENGTH] - request[at.LENGTH]) - 1
    least = request[at.MIN_TOKENS] - written
    return int(min(left, longest, least - 1 if least > 0 else longest))


@compiled()
def classify(
    out: NDArray[np.float32], tokens: NDArray[np.int32], classes: NDArray[np.float32]
) -> None:
    """Shares of a draft's tokens in each class, then those of its first; ids behind the vocabulary
    have none. Mutates ``out`` [2 * classes]."""
    width = classes.shape[1]
    out[:] = 0.0
    for place in range(len(tokens)):
        token = tokens[place]
        if 0 <= token < len(classes):
            for c in range(width):
                out[c] += classes[token, c]
                if place == 0:
                    out[width + c] = classes[token, c]
    for c in range(width):
        out[c] /= np.float32(len(tokens))


@compiled()
def describe(
    out: NDArray[np.float32],
    table: Table,
    payoffs: Payoffs,
    slot: int,
    keys: NDArray[np.int64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    score: float,
    match: int,
    local: bool,
    rival_len: int,
    rival_score: float,
    rival_match: int,
    rival_first: float,
    agreement: int,
    classes: NDArray[np.float32],
) -> None:
    """Fill ``out`` with the features of a cache draft, in the order of ``FEATURES``."""
    request, means = table.requests[slot], table.means[slot]
    length, written = len(tokens), request[at.LENGTH] - request[at.PROMPT]
    for offset in (0, 10):
        out[offset], out[offset + 1], out[offset + 2] = score, match, length
    out[3], out[4], out[5], out[6] = rival_score, rival_match, rival_len, agreement
    out[7], out[8], out[9] = request[at.PROMPT], written, max(written - request[at.BROKE_AT], 0)
    for column in range(_LOGGED):
        out[column] = np.log1p(out[column])
    out[13], out[14] = score / length, probs[length - 1]
    for i in range(5):
        place = (1 << i) - 1
        out[15 + i] = probs[place] if place < length else 0.0
    out[20], out[21] = rival_first, agreement / length
    out[22], out[23] = rival_len > 0 and agreement == 0, local
    out[24], out[25] = written / max(request[at.MAX_TOKENS], 1), means[at.SHARE]
    known = request[at.PAYOFFS_SEEN]
    for i in range(3):
        out[26 + i] = table.payoffs[slot, (known - 1 - i) % RECENT] if known > i else 0
    total, most = 0, 0
    for i in range(min(known, RECENT)):
        total += table.payoffs[slot, i]
        most = max(most, table.payoffs[slot, i])
    out[29], out[30] = total / max(min(known, RECENT), 1), most
    out[31] = table.cycles[table.open[slot, 0], at.HELD] if request[at.OPEN] else 0
    out[32], out[33], out[34] = means[at.FIRST], means[at.FAST], means[at.SLOW]
    out[35], out[36] = payoffs.means[request[at.MEMORY], 0], payoffs.means[request[at.MEMORY], 1]
    out[37] = means[at.RECENT_MODEL]
    recall(payoffs, request[at.MEMORY], keys, out[_RECALLED:_SHARES])
    classify(out[_SHARES:], tokens, classes)


@compiled()
def keys_of(
    context: NDArray[np.int32], length: int, tokens: NDArray[np.int32], keys: NDArray[np.int64]
) -> None:
    """Fill ``keys`` with what the memory is asked by, in the order of ``MEMORY_KEYS``."""
    keys[0] = hashed(tokens, 0, min(len(tokens), 8), 11)
    keys[1] = hashed(context, BACK - min(length, 2), BACK, 22)
    keys[2] = hashed(tokens, 0, 1, hashed(context, BACK - min(length, 1), BACK, 33) & 0x7FFFFFFF)


@compiled((
    HANDLE, HANDLE, HANDLE, WHOLES, WHOLE, YES, WHOLE, WHOLE, REALS_3, MATRIX,
))  # fmt: skip
def propose(
    requests: Any,
    text: Any,
    memories: Any,
    slots: NDArray[np.int64],
    longest: int,
    shown: bool,
    depth: int,
    most: int,
    limits: tuple[float, float, float],
    classes: NDArray[np.float32],
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.float32],
    NDArray[np.int32],
    NDArray[np.int64],
]:
    """Look up the cache drafts of those that may have a draft, and describe them.

    Args:
        requests, text, memories: handles of table, pool and payoffs.
        slots: of the step's requests, -1 for one that is not followed.
        longest: tokens of a draft at most.
        shown: whether cache drafts are looked up.
        depth, most, limits: of a look-up; see :class:`decoder.drafting.drafts.Limits`.
        classes: of the vocabulary's tokens.

    Returns:
        Of the n requests that may have a draft their places in ``slots`` and their rooms; of the m
        with a cache draft their places among these, the features [m, features], the tokens [m,
        most], and the keys of the memory [m, KINDS].
    """
    table, pool, payoffs = table_of(requests), pool_of(text), payoffs_of(memories)
    count = len(slots)
    places, rooms, owners = (
        np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    )  # fmt: skip
    features = np.empty((count, NUM_FEATURES), np.float32)
    found, keys = np.zeros((count, most), np.int32), np.empty((count, KINDS), np.int64)
    tokens, probs = np.empty((2, most), np.int32), np.empty((2, most), np.float32)
    n, m, scratch = 0, 0, scratch_for(most)
    if shown:
        ahead = np.empty((2 * count, len(ORDERS)), np.int64)
        for i in range(count):
            own, context = table.requests[slots[i], at.INDEX], table.contexts[slots[i]]
            for order in range(len(ORDERS)):
                ahead[2 * i, order] = newest(pool, own, context, order)
                ahead[2 * i + 1, order] = newest(pool, pool.indexes[own, SHARED], context, order)
        fetch(pool, ahead.ravel())
    for place in range(count):
        slot = slots[place]
        room = room_of(table, slot, longest) if slot >= 0 else 0
        if room <= 0:
            continue
        places[n], rooms[n] = place, room
        n += 1
        request = table.requests[slot]
        own = request[at.INDEX]
        if not shown or own == 0:
            continue
        length = min(request[at.LENGTH], BACK)
        context = table.contexts[slot, BACK - length :]
        mine, match, score, theirs, their_match, their_score = 0, 0, 0.0, 0, 0, 0.0
        limit, shared = min(room, most), pool.indexes[own, SHARED]
        if pool.indexes[own, PAGES] > 0:
            mine, match, score, _ = draft(
                pool, own, context, limit, depth, limits, tokens[0], probs[0], scratch
            )
        if shared > 0 and pool.indexes[shared, PAGES] > 0:
            theirs, their_match, their_score, _ = draft(
                pool, shared, context, limit, depth, limits, tokens[1], probs[1], scratch
            )
        if mine == 0 and theirs == 0:
            continue
        best = 0
        if mine == 0 or (theirs > 0 and their_score > score):
            best = 1
            mine, theirs = theirs, mine
            match, their_match = their_match, match
            score, their_score = their_score, score
        agreement = 0
        while agreement < min(mine, theirs) and tokens[0, agreement] == tokens[1, agreement]:
            agreement += 1
        found[m, :mine] = tokens[best, :mine]
        keys_of(table.contexts[slot], request[at.LENGTH], found[m, :mine], keys[m])
        describe(
            features[m], table, payoffs, slot, keys[m], found[m, :mine], probs[best, :mine], score,
            match, best == 0, theirs, their_score, their_match,
            float(probs[1 - best, 0]) if theirs else 0.0, agreement, classes,
        )  # fmt: skip
        owners[m] = n - 1
        m += 1
    return places[:n], rooms[:n], owners[:m], features[:m], found[:m], keys[:m]
