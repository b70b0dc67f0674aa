"""Paged text pool with hash chains (as in LZ77 compressors) over the last 1, 2 or 3 tokens.

A *stream* is text in order: a request's own, or its output in the index of its key. An *index* is
the set of streams that one look-up searches. Each position links to the previous one in its index
that ends in the same 1, 2 or 3 tokens (``ORDERS``).

A freed page is overwritten. Stale chains and links to it are detected when they are followed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Int32Array, Int32Matrix, compiled, entry_point

ORDERS: Final = (1, 2, 3)
"""Tokens shared by all positions of a chain."""
BITS: Final = 7
PAGE: Final = 1 << BITS
"""Tokens per page."""
LAST: Final = PAGE - 1
END: Final = -1
"""Separator between unrelated texts."""
NEVER: Final = 1 << 62
INDEX: Final = np.dtype(
    [
        ("begin", "i8"),  # its first bucket; their number is a power of two
        ("mask", "i8"),  # number of buckets - 1
        ("num_pages", "i8"),
        # the index of a request only
        ("own", "i8"),  # last page of its text
        ("output", "i8"),  # last page of its output in the index of its key
        ("shared", "i8"),  # index of its key
        ("pending", "i8"),  # 1: a part of its prompt is not indexed yet
    ],
    align=True,
)
PAGES: Final = np.dtype(
    [
        ("owner", "i4"),  # its index
        ("before", "i4"),  # neighbours in its stream
        ("after", "i4"),
        ("filled", "i4"),  # tokens
        ("born", "i8"),  # when it was opened, by ``clock``
        ("closed", "i8"),  # when the next page of its stream was opened
    ],
    align=True,
)
COUNTS: Final = np.dtype(
    [
        ("free", "i8"),  # freed pages
        ("fresh", "i8"),  # first page never used
        ("clock", "i8"),  # pages opened so far
    ],
    align=True,
)


class Pool(NamedTuple):
    """Pages, and the tables of all indexes; page 0 and index 0 mean "none".

    ``heads`` hold the newest position of a bucket, ``chains`` the previous one for each position.
    """

    text: Int32Array  # [slots]
    chains: Int32Matrix  # [slots, orders]
    heads: Int32Matrix  # [buckets, orders]
    indexes: Annotated[NDArray[Any], INDEX]
    pages: Annotated[NDArray[Any], PAGES]
    free: Int32Array  # [pages], stack of freed pages
    counts: Annotated[NDArray[Any], COUNTS]  # [1]


def new_pool(pages: int, buckets: int, indexes: int) -> Pool:
    """An empty, zeroed pool: the system allocates memory lazily, on the first write.

    Args:
        pages: of ``PAGE`` tokens; the first is unused.
        buckets: of all indexes together.
    """
    counts = np.zeros(1, COUNTS)
    counts["fresh"] = 1
    return Pool(
        np.zeros(pages * PAGE, np.int32), np.zeros((pages * PAGE, len(ORDERS)), np.int32),
        np.zeros((buckets, len(ORDERS)), np.int32), np.zeros(indexes, INDEX),
        np.zeros(pages, PAGES), np.zeros(pages, np.int32), counts,
    )  # fmt: skip


@compiled
def mixed(state: int, token: int) -> int:
    """32-bit hash ``state``, updated with one token."""
    state = ((state ^ token) * 0x2C1B3C6D) & 0xFFFFFFFF
    return state ^ (state >> 15)


@compiled
def open_page(pool: Pool, index: int, before: int) -> int:
    """Open a page that continues ``before`` (0: a new stream); 0 if none is free. Mutates."""
    counts = pool.counts[0]
    free, page = counts["free"], int(counts["fresh"])
    if free > 0:
        counts["free"] = free - 1
        page = int(pool.free[free - 1])
    elif page < len(pool.pages):
        counts["fresh"] = page + 1
    else:
        return 0
    counts["clock"] += 1
    opened = pool.pages[page]
    opened["owner"], opened["before"], opened["after"], opened["filled"] = index, before, 0, 0
    opened["born"], opened["closed"] = counts["clock"], NEVER
    if before > 0:
        pool.pages[before]["after"] = page
        pool.pages[before]["closed"] = counts["clock"]
    return page


@compiled
def slot_before(pages: NDArray[Any], slot: int) -> int:
    """Previous position in the stream, or 0."""
    if slot & LAST:
        return slot - 1
    page = slot >> BITS
    before = int(pages[page]["before"])
    if before == 0 or pages[before]["after"] != page:
        return 0
    return before * PAGE + LAST


@compiled
def slot_after(pages: NDArray[Any], slot: int) -> int:
    """Next position in the stream, or 0."""
    page, at = slot >> BITS, (slot & LAST) + 1
    if at < PAGE:
        return slot + 1 if at < pages[page]["filled"] else 0
    after = int(pages[page]["after"])
    if after == 0 or pages[after]["before"] != page or not pages[after]["filled"]:
        return 0
    return after * PAGE


@entry_point
def append(pool: Pool, index: int, page: int, tokens: Int32Array) -> int:
    """Append int32 ``tokens`` [n] to a stream and link them into the chains. Mutates.

    Args:
        page: last page of the stream; 0 for a new stream.

    Returns:
        Last page of the stream now. When no page is free, the remaining tokens are dropped.
    """
    begin, mask = int(pool.indexes[index]["begin"]), int(pool.indexes[index]["mask"])
    text, chains, heads, pages = pool.text, pool.chains, pool.heads, pool.pages
    longest = ORDERS[-1]
    last = np.full(longest, END, np.int64)  # newest first
    if page > 0:
        slot = page * PAGE + int(pages[page]["filled"]) - 1
        for i in range(longest):
            if slot == 0:
                break
            last[i] = text[slot]
            slot = slot_before(pages, slot)
    at = int(pages[page]["filled"]) if page > 0 else PAGE
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
        pages[page]["filled"] = at
    return page


@compiled
def fits(pool: Pool, index: int, count: int) -> bool:
    """Whether :func:`append_both` can append ``count`` tokens of a request: both its streams exist,
    and each can get one more page."""
    row, counts = pool.indexes[index], pool.counts[0]
    if row["pending"] or row["own"] == 0 or count > PAGE:
        return False
    if row["shared"] > 0 and row["output"] == 0:
        return False
    return bool(counts["free"] + len(pool.pages) - counts["fresh"] > 1)


@compiled
def append_both(pool: Pool, index: int, tokens: NDArray[np.int32]) -> bool:
    """Append tokens that fit (:func:`fits`) to a request's text and to its key's. Mutates.

    Returns:
        Whether a page was opened; the caller must account for it.
    """
    row, counts = pool.indexes[index], pool.counts[0]
    before = counts["clock"]
    row["own"] = append(pool, index, row["own"], tokens)
    row["num_pages"] += counts["clock"] - before
    opened_before, shared = counts["clock"], row["shared"]
    if shared > 0:
        row["output"] = append(pool, shared, row["output"], tokens)
        pool.indexes[shared]["num_pages"] += counts["clock"] - opened_before
    return bool(counts["clock"] > before)


@entry_point
def give_page(pool: Pool, page: int) -> None:
    """Free a page. Mutates."""
    counts, freed = pool.counts[0], pool.pages[page]
    freed["owner"], freed["before"], freed["after"], freed["filled"] = 0, 0, 0, 0
    pool.free[counts["free"]] = page
    counts["free"] += 1


@entry_point
def first_page(pool: Pool, page: int) -> int:
    """The oldest page of the stream that contains ``page``."""
    before = page * PAGE
    while before > 0:
        page = before >> BITS
        before = slot_before(pool.pages, page * PAGE)
    return page


@entry_point
def give_stream(pool: Pool, page: int) -> int:
    """Free the stream whose last page is ``page``; the number of its pages. Mutates."""
    freed = 0
    while page > 0:
        before = slot_before(pool.pages, page * PAGE)
        give_page(pool, page)
        page = before >> BITS
        freed += 1
    return freed
