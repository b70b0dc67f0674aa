"""Suffix matching: find earlier occurrences of the context's end in an index and draft from them.

A look-up follows the hash chain of the context's end to its ``MOST`` newest occurrences and
measures the match length of each. The occurrences with the longest match vote on each next token.
Probabilities, score and limits are those of SuffixDecoding (arXiv 2411.04975). The context's own
end is an occurrence too, without a continuation: a single earlier occurrence has probability 1/2.

A draft only copies from its own window: a link to a position that the window has lost ends a chain.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Float32Array, Int32Array, compiled, entry_point
from decoder.drafting.windows import (
    END,
    ORDERS,
    PAGE,
    Pool,
    after,
    before,
    bucket_of,
    mixed,
    slot_of,
)

Tokens = NDArray[np.int32]


class Limits(NamedTuple):
    """Limits of a look-up. A draft has at most ``factor * matched tokens + offset`` tokens."""

    depth: int  # maximum tokens of matched context and draft together
    most: int  # maximum tokens of a draft
    factor: float
    offset: float
    least: float  # minimum probability of a draft's last token


STOCK: Final = Limits(24, 24, 1.0, 0.0, 0.1)
"""Defaults of vLLM's suffix decoding (``SpeculativeConfig`` of vLLM 0.32: depth, factor, minimum
probability); its drafts are at most as long as its trees are deep."""
MOST: Final = 16  # maximum occurrences taken from a chain
STEPS: Final = 4
"""Chain positions visited per occurrence: buckets also contain hash collisions."""
BACK: Final = 32  # maximum match length that is measured, tokens
FULL: Final = 8
"""Maximum occurrences of full match length ``BACK``, and minimum distance between two of them in
tokens. Looping text matches everywhere, and the work is occurrences times tokens."""
WORK: Final = 4096  # tokens compared, after which no shorter match is tried: 3 to 6 us
PREFETCHED: Final = 8
"""Positions of each chain that are prefetched. A look-up is bound by memory latency, one position
after the other; loads of many chains overlap."""


class Scratch(NamedTuple):
    """Scratch arrays of :func:`draft`: occurrences, and the continuation being tried."""

    positions: Int32Array  # [MOST], positions where the context ends, newest first
    lens: Int32Array  # [MOST], match length of each
    voters: Int32Array  # [MOST], positions that vote
    votes: Int32Array  # [MOST], their tokens
    tokens: Int32Array  # [longest]
    probs: Float32Array  # [longest]


@entry_point
def scratch_for(most: int) -> Scratch:
    """Scratch arrays for drafts of at most ``most`` tokens."""
    ids = np.empty((4, MOST), np.int32)
    tokens, probs = np.empty(most, np.int32), np.empty(most, np.float32)
    return Scratch(ids[0], ids[1], ids[2], ids[3], tokens, probs)


@compiled
def matched(pool: Pool, index: int, position: int, context: NDArray[np.int32], most: int) -> int:
    """Length of the common suffix of ``context`` and a window's text up to ``position``, at most
    ``most``."""
    window, last, count = pool.windows[index], len(context) - 1, 0
    slot = slot_of(window, position)
    while count < most and position > 0:
        if pool.text[slot] != context[last - count]:
            break
        count += 1
        if position & (PAGE - 1):
            position, slot = position - 1, slot - 1
        else:
            position = before(pool, window, position)
            slot = slot_of(window, position)
    return count


@compiled
def newest(pool: Pool, index: int, context: NDArray[np.int32], order: int) -> int:
    """Newest position of the chain for the end of ``context``; 0 or a lost one without any."""
    state = 0
    for i in range(ORDERS[order]):
        state = mixed(state, int(context[len(context) - 1 - i]))
    return int(pool.heads[bucket_of(pool.windows[index], state), order])


@compiled
def gather(
    pool: Pool,
    index: int,
    context: NDArray[np.int32],
    order: int,
    most: int,
    scratch: Scratch,
) -> tuple[int, int]:
    """Find earlier occurrences of the end of ``context`` by the chain of ``order``, and their match
    lengths up to ``most``. Fills ``positions`` and ``lens`` of ``scratch``.

    Returns:
        number of occurrences, and tokens compared.
    """
    window, positions, lens = pool.windows[index], scratch.positions, scratch.lens
    position, first = newest(pool, index, context, order), window["first"]
    count, full, last, work = 0, 0, -FULL, 0
    for _ in range(MOST * STEPS):
        if position < first or count == MOST or full == FULL:
            break
        work += 1
        if abs(position - last) >= FULL:
            length = matched(pool, index, position, context, most)
            work += length
            positions[count], lens[count] = position, length
            count += length >= ORDERS[order]
            if length == BACK:
                full, last = full + 1, position
        position = int(pool.chains[slot_of(window, position), order])
    return count, work


@compiled
def fetch(pool: Pool, indexes: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
    """Prefetch ``PREFETCHED`` positions of the chains of n windows. Overwrites ``positions`` [n,
    orders]: the newest one of each chain."""
    seen = 0
    for _ in range(PREFETCHED):
        for i in range(len(indexes)):
            window = pool.windows[indexes[i]]
            for order in range(len(ORDERS)):
                slot = slot_of(window, positions[i, order])
                seen += pool.text[slot]
                positions[i, order] = pool.chains[slot, order]
    positions[:1] = seen  # else the compiler removes the loads


@compiled
def most_of(votes: NDArray[np.int32], count: int) -> tuple[int, int]:
    """The most frequent of ``count`` tokens (on a tie the first), and its frequency."""
    best, most = votes[0], 0
    for i in range(count):
        same = 0
        for j in range(count):
            if votes[j] == votes[i]:
                if j < i:
                    break
                same += 1
        if same > most:
            best, most = votes[i], same
    return best, most


@compiled
def vote(
    pool: Pool, index: int, count: int, limit: int, least: float, scratch: Scratch
) -> tuple[int, float, int]:
    """Majority vote on each next token by the first ``count`` of ``voters``; ties go to the newest.
    Fills ``tokens`` and ``probs`` of ``scratch``, and overwrites ``voters``.

    Returns:
        number of tokens, at most ``limit`` and while their probability is ``least`` or more; the
        sum of their probabilities; and tokens compared.
    """
    positions, votes, window = scratch.voters, scratch.votes, pool.windows[index]
    length, score, prob, work = 0, 0.0, 1.0, 0
    while length < limit:
        voters, newest_votes = 0, 0
        for i in range(count):
            position = after(pool, window, int(positions[i]))
            token = pool.text[slot_of(window, position)] if position > 0 else END
            if token != END:
                positions[voters], votes[voters] = position, token
                newest_votes += token == votes[0]
                voters += 1
        work += count
        if not voters:
            break
        best, most = votes[0], newest_votes
        if 2 * newest_votes < voters:
            best, most = most_of(votes, voters)
            work += voters
        # the end of a text votes against its first continuation only
        prob *= most / (voters if length else count)
        if prob < least:
            break
        scratch.tokens[length], scratch.probs[length] = best, prob
        score += prob
        length += 1
        count = voters
        if most < voters:
            count = 0
            for i in range(voters):
                positions[count] = positions[i]
                count += votes[i] == best
    return length, score, work


@compiled
def predicted(pool: Pool, index: int, count: int) -> int:
    """How many of the last ``count`` tokens of a request's own text its earlier text predicted: the
    token that last followed the same tokens of the longest order. Independent of any drafter."""
    window, longest, hits = pool.windows[index], len(ORDERS) - 1, 0
    position = window["last"]
    if position == 0 or window["linked"] < position:
        return 0  # no text, or a prompt that is not fully indexed yet
    for _ in range(count):
        token, position = pool.text[slot_of(window, position)], before(pool, window, position)
        if position == 0:
            break
        earlier = position
        for _ in range(STEPS):  # buckets also contain hash collisions
            earlier = int(pool.chains[slot_of(window, earlier), longest])
            if earlier < window["first"]:
                break
            same, ours, theirs = 0, position, earlier
            while same < ORDERS[longest] and ours > 0 and theirs > 0:
                if pool.text[slot_of(window, ours)] != pool.text[slot_of(window, theirs)]:
                    break
                same += 1
                ours, theirs = before(pool, window, ours), before(pool, window, theirs)
            if same == ORDERS[longest]:
                hits += pool.text[slot_of(window, earlier + 1)] == token
                break
    return hits


@compiled
def limit_of(match: int, limits: Limits) -> int:
    """Maximum draft length for a match of ``match`` tokens."""
    length = int(max(match * limits.factor + limits.offset + 1e-6, 0.0))
    return min(limits.most, length, limits.depth - match)


@compiled
def widest(low: int, high: int, limits: Limits) -> int:
    """Maximum draft length for matches of ``low`` to ``high`` tokens."""
    limit = 0
    for match in range(low, high + 1):
        limit = max(limit, limit_of(match, limits))
    return limit


@compiled
def below(match: int, lens: NDArray[np.int32], count: int, least: int) -> int:
    """The longest of ``count`` matches that is shorter than ``match``, at least ``least``."""
    for i in range(count):
        least = max(least, lens[i] * (lens[i] < match))
    return least


class Continuation(NamedTuple):
    """A draft, and how it was positions."""

    length: int  # tokens
    match: int  # match length, context tokens
    score: float  # sum of its probabilities
    work: int  # tokens compared


class Written(NamedTuple):
    """Output arrays of a draft."""

    tokens: Int32Array  # [longest]
    probs: Float32Array  # [longest]


def written_for(most: int) -> Written:
    """Output arrays for drafts of at most ``most`` tokens."""
    return Written(np.empty(most, np.int32), np.empty(most, np.float32))


@entry_point
def draft(
    pool: Pool, index: int, context: Int32Array, limits: Limits, out: Written, scratch: Scratch
) -> Continuation:
    """The continuation with the highest score over all match lengths. Fills ``out`` up to its
    length; ``scratch`` is for ``limits.most`` tokens or more."""
    best, drafted, match_len, work = 0.0, 0, 0, 0
    longest = min(len(context), BACK, limits.depth)
    for order in range(len(ORDERS) - 1, -1, -1):
        low = ORDERS[order]
        high = longest if order == len(ORDERS) - 1 else min(longest, ORDERS[order + 1] - 1)
        if widest(low, high, limits) <= best:
            continue
        count, compared = gather(pool, index, context, order, high, scratch)
        work += compared
        match = high + 1
        while work < WORK:
            match = below(match, scratch.lens, count, 0)
            if not match:
                break
            # the same positions vote for all of these match lengths
            lower = below(match, scratch.lens, count, low - 1)
            limit = widest(lower + 1, match, limits)
            if limit <= best:
                continue
            voting = 0
            for i in range(count):
                scratch.voters[voting] = scratch.positions[i]
                voting += scratch.lens[i] >= match
            length, score, compared = vote(pool, index, voting, limit, limits.least, scratch)
            work += compared
            if score > best:
                best, drafted, match_len = score, length, match
                while limit_of(match_len, limits) < length:
                    match_len -= 1
                out.tokens[:length] = scratch.tokens[:length]
                out.probs[:length] = scratch.probs[:length]
    return Continuation(drafted, match_len, best, work)
