"""Where text has gone on before: a match finder with hash chains, as functions over plain arrays.

Text lies in pages of one pool. A *stream* is text written in order, a request's own or its output
among others' of its key; an *index* is the streams that are looked up together. Each position is
chained to the last one of its index that ends in the same 1, 2 or 3 tokens (``ORDERS``), as
compressors do it. A look-up follows the chain of the context's end to its ``MOST`` newest
occurrences, measures how far back each matches, and lets those that match furthest vote on every
next token; probabilities, score, limit and cut are those of SuffixDecoding (arXiv 2411.04975). The
context's own end is an occurrence too, with nothing behind it: one earlier occurrence has a
probability of 1/2.

A page given up is written over: chains and links that led to it are noticed when they are followed.
What a draft may show is what lies in pages of its own index, whatever a chain says.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    FLOATS_3,
    IDS,
    IDS_2,
    IDS_3,
    REALS_2,
    REALS_3,
    WHOLE,
    WHOLES,
    WHOLES_2,
    WHOLES_3,
    YES,
    compiled,
    record,
)

ORDERS: Final = (1, 2, 3)
"""Tokens that the positions of a chain have in common."""
MOST: Final = 16
"""Occurrences that a chain is asked for."""
STEPS: Final = 4
"""Positions looked at for each of them: a bucket holds other tokens' positions, too."""
BACK: Final = 32
"""Tokens that a match is measured back at most."""
FULL: Final = 8
"""Occurrences that match as far as is measured, after which no more are asked for; and positions
between two of them. Text that loops matches everywhere, and what is looked at is a product of
occurrences and tokens."""
WORK: Final = 4096
"""Tokens looked at, after which no shorter match is tried: 3 to 6 us."""
BITS: Final = 7
PAGE: Final = 1 << BITS
"""Tokens of a page."""
LAST: Final = PAGE - 1
END: Final = -1
"""Written between texts that do not go on from each other."""
NEVER: Final = 1 << 62
OWNER, BEFORE, AFTER, FILLED = range(4)
BORN, CLOSED = range(2)
FREE, FRESH, CLOCK = range(3)
BEGIN, MASK = range(2)


class Pool(NamedTuple):
    """Pages, and the tables of all indexes; page 0 and index 0 are nobody's, and mean none.

    An index's buckets begin where ``indexes`` says, and are a power of two; beside it stands that
    less one. ``heads`` hold the newest position of a bucket, ``chains`` the one before each.
    ``links`` say of a page whose it is, the pages before and after it in its stream, and how much
    of it is written; ``times`` when it was begun and when the next one was, by a clock of pages.
    """

    text: NDArray[np.int32]  # [slots]
    chains: NDArray[np.int32]  # [slots, orders]
    heads: NDArray[np.int32]  # [buckets, orders]
    indexes: NDArray[np.int64]  # [indexes, 2]
    links: NDArray[np.int32]  # [pages, 4]
    times: NDArray[np.int64]  # [pages, 2]
    free: NDArray[np.int32]  # [pages], those given up
    counts: NDArray[np.int64]  # [3]: how many these are, the first never used, and the clock


POOL: Final = record(Pool, IDS, IDS_2, IDS_2, WHOLES_2, IDS_2, WHOLES_2, IDS, WHOLES)


def new_pool(pages: int, buckets: int, indexes: int) -> Pool:
    """An empty pool, of zeros: what is not written takes no memory where the system gives it late.

    Args:
        pages: of ``PAGE`` tokens, the first of them nobody's.
        buckets: of all indexes together.
    """
    return Pool(
        np.zeros(pages * PAGE, np.int32), np.zeros((pages * PAGE, len(ORDERS)), np.int32),
        np.zeros((buckets, len(ORDERS)), np.int32), np.zeros((indexes, 2), np.int64),
        np.zeros((pages, 4), np.int32), np.zeros((pages, 2), np.int64), np.zeros(pages, np.int32),
        np.array([0, 1, 0], np.int64),
    )  # fmt: skip


@compiled()
def mixed(state: int, token: int) -> int:
    """A hash of 32 bits, of one token more."""
    state = ((state ^ token) * 0x2C1B3C6D) & 0xFFFFFFFF
    return state ^ (state >> 15)


@compiled()
def open_page(pool: Pool, index: int, before: int) -> int:
    """A page that goes on from ``before`` (0: from none); 0 if there is none left. Mutates."""
    left, page = pool.counts[FREE], int(pool.counts[FRESH])
    if left > 0:
        pool.counts[FREE] = left - 1
        page = int(pool.free[left - 1])
    elif page < len(pool.links):
        pool.counts[FRESH] = page + 1
    else:
        return 0
    pool.counts[CLOCK] += 1
    pool.links[page, OWNER] = index
    pool.links[page, BEFORE] = before
    pool.links[page, AFTER] = 0
    pool.links[page, FILLED] = 0
    pool.times[page, BORN] = pool.counts[CLOCK]
    pool.times[page, CLOSED] = NEVER
    if before > 0:
        pool.links[before, AFTER] = page
        pool.times[before, CLOSED] = pool.counts[CLOCK]
    return page


@compiled()
def slot_before(links: NDArray[np.int32], slot: int) -> int:
    """The position before one in its stream, or 0."""
    if slot & LAST:
        return slot - 1
    page = slot >> BITS
    before = int(links[page, BEFORE])
    if before == 0 or links[before, AFTER] != page:
        return 0
    return before * PAGE + LAST


@compiled()
def slot_after(links: NDArray[np.int32], slot: int) -> int:
    """The position after one in its stream, or 0."""
    page, at = slot >> BITS, (slot & LAST) + 1
    if at < PAGE:
        return slot + 1 if at < links[page, FILLED] else 0
    after = int(links[page, AFTER])
    if after == 0 or links[after, BEFORE] != page or not links[after, FILLED]:
        return 0
    return after * PAGE


@compiled((POOL, WHOLE, WHOLE, IDS))
def append(pool: Pool, index: int, page: int, tokens: NDArray[np.int32]) -> int:
    """Write int32 ``tokens`` [n] to a stream. Mutates.

    Args:
        page: that its last token is in; 0 for a new stream.

    Returns:
        The page that its last token is in now; where no page was left for a token, it and those
        behind it are left out.
    """
    begin, mask = int(pool.indexes[index, BEGIN]), int(pool.indexes[index, MASK])
    text, chains, heads, links = pool.text, pool.chains, pool.heads, pool.links
    longest = ORDERS[-1]
    last = np.full(longest, END, np.int64)  # the newest first
    if page > 0:
        slot = page * PAGE + int(links[page, FILLED]) - 1
        for i in range(longest):
            if slot == 0:
                break
            last[i] = text[slot]
            slot = slot_before(links, slot)
    at = int(links[page, FILLED]) if page > 0 else PAGE
    for i in range(len(tokens)):
        if at == PAGE:
            full, page, at = page, open_page(pool, index, page), 0
            if page == 0:
                return full
        for j in range(longest - 1, 0, -1):
            last[j] = last[j - 1]
        last[0] = tokens[i]
        slot = page * PAGE + at
        at += 1
        text[slot] = tokens[i]
        state, order = 0, 0
        for j in range(longest):
            state = mixed(state, int(last[j]))
            if j + 1 == ORDERS[order]:
                bucket = begin + (state & mask)
                chains[slot, order] = heads[bucket, order]
                heads[bucket, order] = slot
                order += 1
        links[page, FILLED] = at
    return page


@compiled((POOL, WHOLES, WHOLES, IDS, WHOLES, WHOLES))
def append_all(
    pool: Pool,
    indexes: NDArray[np.int64],
    pages: NDArray[np.int64],
    tokens: NDArray[np.int32],
    ends: NDArray[np.int64],
    opened: NDArray[np.int64],
) -> None:
    """:func:`append` to n streams, of ``tokens`` up to the ``ends`` [n] of each. Mutates.

    Args:
        indexes, pages: [n], of the streams; each page is overwritten by the stream's last one then.
        opened: [n], filled: how many pages were begun.
    """
    begin = 0
    for i in range(len(ends)):
        before = pool.counts[CLOCK]
        pages[i] = append(pool, indexes[i], pages[i], tokens[begin : ends[i]])
        opened[i] = pool.counts[CLOCK] - before
        begin = ends[i]


@compiled((POOL, WHOLE, YES))
def close_page(pool: Pool, page: int, closed: bool) -> None:
    """Say that a stream goes on no more, or that it does again. Mutates."""
    pool.times[page, CLOSED] = pool.counts[CLOCK] if closed else NEVER


@compiled((POOL, WHOLE))
def give_page(pool: Pool, page: int) -> None:
    """Give up a page, whatever is in it. Mutates."""
    pool.links[page] = 0
    pool.free[pool.counts[FREE]] = page
    pool.counts[FREE] += 1


@compiled((POOL, WHOLE))
def first_page(pool: Pool, page: int) -> int:
    """The oldest page of the stream that ``page`` is of."""
    before = page * PAGE
    while before > 0:
        page = before >> BITS
        before = slot_before(pool.links, page * PAGE)
    return page


@compiled((POOL, WHOLE))
def give_stream(pool: Pool, page: int) -> int:
    """Give up the stream whose last page is ``page``; how many pages it had. Mutates."""
    given = 0
    while page > 0:
        before = slot_before(pool.links, page * PAGE)
        give_page(pool, page)
        page = before >> BITS
        given += 1
    return given


@compiled()
def matched(
    text: NDArray[np.int32],
    links: NDArray[np.int32],
    slot: int,
    context: NDArray[np.int32],
    most: int,
) -> int:
    """How many tokens, at most ``most``, end alike at a position and in ``context``."""
    length, count = len(context), 0
    while count < most and slot > 0 and text[slot] == context[length - 1 - count]:
        count += 1
        slot = slot_before(links, slot)
    return count


@compiled()
def gather(
    pool: Pool,
    index: int,
    context: NDArray[np.int32],
    order: int,
    most: int,
    found: NDArray[np.int32],
    lens: NDArray[np.int32],
) -> tuple[int, int]:
    """The newest positions where ``context`` ends, the newest first, and how far each matches.

    Args:
        order: of the chain to follow.
        most: tokens back at most.
        found, lens: [MOST], filled.

    Returns:
        how many there are, and tokens looked at.
    """
    text, links, times, chains = pool.text, pool.links, pool.times, pool.chains
    least = ORDERS[order]
    state = 0
    for i in range(least):
        state = mixed(state, int(context[len(context) - 1 - i]))
    bucket = pool.indexes[index, BEGIN] + (state & pool.indexes[index, MASK])
    slot, closed = int(pool.heads[bucket, order]), NEVER
    count, full, last, work = 0, 0, -FULL, 0
    for _ in range(MOST * STEPS):
        if slot == 0 or count == MOST or full == FULL:
            break
        page = slot >> BITS
        if (
            links[page, OWNER] != index
            or (slot & LAST) >= links[page, FILLED]
            or times[page, BORN] > closed
        ):
            break  # written over since, and so is all that is older
        closed = times[page, CLOSED]
        work += 1
        if abs(slot - last) >= FULL:
            length = matched(text, links, slot, context, most)
            work += length
            if length >= least:
                found[count], lens[count] = slot, length
                count += 1
            if length == BACK:
                full, last = full + 1, slot
        slot = int(chains[slot, order])
    return count, work


@compiled()
def most_of(votes: NDArray[np.int32], count: int) -> tuple[int, int]:
    """The commonest of ``count`` tokens, the first of equals, and how many these are."""
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


@compiled()
def vote(
    pool: Pool,
    slots: NDArray[np.int32],
    count: int,
    limit: int,
    least: float,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    votes: NDArray[np.int32],
) -> tuple[int, float, int]:
    """How ``count`` positions go on, the most of them at each token; among equals the newest's.

    Args:
        slots, votes: [MOST], overwritten.
        least: probability below which a draft does not go on.
        tokens, probs: [limit] or more, filled.

    Returns:
        tokens, the sum of their probabilities, and tokens looked at.
    """
    text, links = pool.text, pool.links
    length, score, prob, work = 0, 0.0, 1.0, 0
    while length < limit:
        going, same = 0, 0
        for i in range(count):
            slot = slot_after(links, int(slots[i]))
            if slot > 0 and text[slot] != END:
                slots[going], votes[going] = slot, text[slot]
                same += votes[going] == votes[0]
                going += 1
        work += count
        if not going:
            break
        best, most = votes[0], same
        if 2 * same < going:
            best, most = most_of(votes, going)
            work += going
        prob *= most / (
            going if length else count
        )  # the end of a text says nothing of what follows
        if prob < least:
            break
        tokens[length], probs[length] = best, prob
        score += prob
        length += 1
        count = going
        if most < going:
            count = 0
            for i in range(going):
                if votes[i] == best:
                    slots[count] = slots[i]
                    count += 1
    return length, score, work


@compiled()
def limit_of(match: int, most: int, depth: int, factor: float, offset: float) -> int:
    """Tokens of a draft behind ``match`` tokens."""
    return min(most, int(max(match * factor + offset + 1e-6, 0.0)), depth - match)


@compiled()
def widest(low: int, high: int, most: int, depth: int, factor: float, offset: float) -> int:
    """Tokens of a draft behind ``low`` to ``high`` tokens, at most."""
    limit = 0
    for match in range(low, high + 1):
        limit = max(limit, limit_of(match, most, depth, factor, offset))
    return limit


@compiled()
def below(match: int, lens: NDArray[np.int32], count: int, least: int) -> int:
    """The greatest of ``count`` matches that are shorter than ``match``, or ``least``."""
    for i in range(count):
        if least < lens[i] < match:
            least = lens[i]
    return least


@compiled()
def draft(
    pool: Pool,
    index: int,
    context: NDArray[np.int32],
    most: int,
    depth: int,
    limits: tuple[float, float, float],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
) -> tuple[int, int, float, int]:
    """The continuation with the highest score, of those behind each match length.

    Returns:
        tokens drafted into ``tokens`` and ``probs``, the match they stand behind, their score, and
        tokens looked at.
    """
    factor, offset, least = limits
    found, lens = np.empty(MOST, np.int32), np.empty(MOST, np.int32)
    slots, votes = np.empty(MOST, np.int32), np.empty(MOST, np.int32)
    tried, chances = np.empty(most, np.int32), np.empty(most, np.float32)
    best, drafted, behind, work = 0.0, 0, 0, 0
    longest = min(len(context), BACK, depth)
    for order in range(len(ORDERS) - 1, -1, -1):
        low = ORDERS[order]
        high = longest if order == len(ORDERS) - 1 else min(longest, ORDERS[order + 1] - 1)
        if widest(low, high, most, depth, factor, offset) <= best:
            continue
        count, looked = gather(pool, index, context, order, high, found, lens)
        work += looked
        match = high + 1
        while work < WORK:
            match = below(match, lens, count, 0)
            if not match:
                break
            # behind these match lengths the same positions vote
            lower = below(match, lens, count, low - 1)
            limit = widest(lower + 1, match, most, depth, factor, offset)
            if limit <= best:
                continue
            voting = 0
            for i in range(count):
                if lens[i] >= match:
                    slots[voting] = found[i]
                    voting += 1
            length, score, looked = vote(pool, slots, voting, limit, least, tried, chances, votes)
            work += looked
            if score > best:
                best, drafted, behind = score, length, match
                while limit_of(behind, most, depth, factor, offset) < length:
                    behind -= 1
                tokens[:length] = tried[:length]
                probs[:length] = chances[:length]
    return drafted, behind, best, work


@compiled(
    (POOL, WHOLES_2, IDS_2, WHOLES, WHOLES, WHOLE, REALS_3, IDS_3, FLOATS_3, WHOLES_3, REALS_2)
)
def look_up(
    pool: Pool,
    indexes: NDArray[np.int64],
    contexts: NDArray[np.int32],
    lengths: NDArray[np.int64],
    rooms: NDArray[np.int64],
    depth: int,
    limits: tuple[float, float, float],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    sizes: NDArray[np.int64],
    scores: NDArray[np.float64],
) -> int:
    """The drafts of n contexts, from each of several indexes.

    Args:
        indexes: [n, k], to look in; 0 for none.
        contexts: int32 [n, w], of which ``lengths`` [n] tokens are there.
        rooms: [n], tokens of a draft at most.
        depth: tokens of context and draft together at most.
        limits: factor, offset, and least probability.
        tokens, probs: [n, k, most], filled.
        sizes: [n, k, 2], filled: tokens of the draft, and of the match it stands behind.
        scores: [n, k], filled.

    Returns:
        Tokens looked at.
    """
    work = 0
    for row in range(len(lengths)):
        context = contexts[row, : lengths[row]]
        for k in range(indexes.shape[1]):
            sizes[row, k, 0], sizes[row, k, 1], scores[row, k] = 0, 0, 0.0
            if indexes[row, k] > 0:
                most = min(rooms[row], tokens.shape[2])
                length, match, score, looked = draft(
                    pool, indexes[row, k], context, most, depth, limits, tokens[row, k],
                    probs[row, k],
                )  # fmt: skip
                sizes[row, k, 0], sizes[row, k, 1], scores[row, k] = length, match, score
                work += looked
    return work
