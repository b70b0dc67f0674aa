"""Text in pages of one pool, each position chained to the one before that ends in the same tokens.

A *stream* is text written in order, a request's own or its output among others' of its key; an
*index* is the streams that are looked up together. Each position is chained to the last one of its
index that ends in the same 1, 2 or 3 tokens (``ORDERS``), as compressors do it.

A page given up is written over: chains and links that led to it are noticed when they are followed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import IDS, IDS_2, WHOLE, WHOLES, WHOLES_2, compiled, opener, record

ORDERS: Final = (1, 2, 3)
"""Tokens that the positions of a chain have in common."""
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
BEGIN, MASK, PAGES, OWN, OUTPUT, SHARED, PENDING = range(7)


class Pool(NamedTuple):
    """Pages, and the tables of all indexes; page 0 and index 0 are nobody's, and mean none.

    An index's buckets begin where ``indexes`` says, and are a power of two; beside it stands that
    less one, and how many pages it has. If it is a request's, its row also has the last page of its
    text and of its output, the index that has the output, and whether a part of its prompt is not
    written yet. ``heads`` hold the newest position of a bucket, ``chains`` the one before each.
    ``links`` say of a page whose it is, the pages before and after it in its stream, and how much
    of it is written; ``times`` when it was begun and when the next one was, by a clock of pages.
    """

    text: NDArray[np.int32]  # [slots]
    chains: NDArray[np.int32]  # [slots, orders]
    heads: NDArray[np.int32]  # [buckets, orders]
    indexes: NDArray[np.int64]  # [indexes, 7]
    links: NDArray[np.int32]  # [pages, 4]
    times: NDArray[np.int64]  # [pages, 2]
    free: NDArray[np.int32]  # [pages], those given up
    counts: NDArray[np.int64]  # [3]: how many these are, the first never used, and the clock


POOL: Final = record(Pool, IDS, IDS_2, IDS_2, WHOLES_2, IDS_2, WHOLES_2, IDS, WHOLES)
pool_of = opener(POOL)


def new_pool(pages: int, buckets: int, indexes: int) -> Pool:
    """An empty pool, of zeros: what is not written takes no memory where the system gives it late.

    Args:
        pages: of ``PAGE`` tokens, the first of them nobody's.
        buckets: of all indexes together.
    """
    return Pool(
        np.zeros(pages * PAGE, np.int32), np.zeros((pages * PAGE, len(ORDERS)), np.int32),
        np.zeros((buckets, len(ORDERS)), np.int32), np.zeros((indexes, 7), np.int64),
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


@compiled()
def fits(pool: Pool, index: int, count: int) -> bool:
    """Whether so many tokens of a request can be appended as they come: its streams have begun, and
    there is a page more for each."""
    row = pool.indexes[index]
    if row[PENDING] or row[OWN] == 0 or (row[SHARED] > 0 and row[OUTPUT] == 0) or count > PAGE:
        return False
    return bool(pool.counts[FREE] + len(pool.links) - pool.counts[FRESH] > 1)


@compiled()
def append_both(pool: Pool, index: int, tokens: NDArray[np.int32]) -> bool:
    """Append tokens that fit (:func:`fits`) to a request's text and to its key's. Mutates.

    Returns:
        Whether a page was begun, which is still to be booked.
    """
    row, before = pool.indexes[index], pool.counts[CLOCK]
    row[OWN] = append(pool, index, row[OWN], tokens)
    row[PAGES] += pool.counts[CLOCK] - before
    began, shared = pool.counts[CLOCK], row[SHARED]
    if shared > 0:
        row[OUTPUT] = append(pool, shared, row[OUTPUT], tokens)
        pool.indexes[shared, PAGES] += pool.counts[CLOCK] - began
    return bool(pool.counts[CLOCK] > before)


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
