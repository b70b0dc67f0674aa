"""Text in pages of one pool, each position chained to the one before that ends in the same tokens.

A *stream* is text written in order, a request's own or its output among others' of its key; an
*index* is the streams that are looked up together. Each position is chained to the last one of its
index that ends in the same 1, 2 or 3 tokens (``ORDERS``), as compressors do it.

A page given up is written over: chains and links that led to it are noticed when they are followed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Int32Array, Int32Matrix, compiled, entry_point

ORDERS: Final = (1, 2, 3)
"""Tokens that the positions of a chain have in common."""
BITS: Final = 7
PAGE: Final = 1 << BITS
"""Tokens of a page."""
LAST: Final = PAGE - 1
END: Final = -1
"""Written between texts that do not go on from each other."""
NEVER: Final = 1 << 62
INDEX: Final = np.dtype(
    [
        ("begin", "i8"),  # its first bucket; it has a power of two of them
        ("mask", "i8"),  # how many these are, less one
        ("num_pages", "i8"),
        # of a request's index alone
        ("own", "i8"),  # the last page of its text
        ("output", "i8"),  # the last page of its output among others' of its key
        ("shared", "i8"),  # the index that has the output
        ("pending", "i8"),  # 1: a part of its prompt is not written yet
    ],
    align=True,
)
PAGES: Final = np.dtype(
    [
        ("owner", "i4"),  # its index
        ("before", "i4"),  # its neighbours in its stream
        ("after", "i4"),
        ("filled", "i4"),  # tokens
        ("born", "i8"),  # when it was begun, by the clock of pages
        ("closed", "i8"),  # when the next page of its stream was begun
    ],
    align=True,
)
COUNTS: Final = np.dtype(
    [
        ("free", "i8"),  # pages that were given up
        ("fresh", "i8"),  # the first page never used
        ("clock", "i8"),  # pages begun
    ],
    align=True,
)


class Pool(NamedTuple):
    """Pages, and the tables of all indexes; page 0 and index 0 are nobody's, and mean none.

    ``heads`` hold the newest position of a bucket, ``chains`` the one before each.
    """

    text: Int32Array  # [slots]
    chains: Int32Matrix  # [slots, orders]
    heads: Int32Matrix  # [buckets, orders]
    indexes: Annotated[NDArray[Any], INDEX]
    pages: Annotated[NDArray[Any], PAGES]
    free: Int32Array  # [pages], those given up
    counts: Annotated[NDArray[Any], COUNTS]  # [1]


def new_pool(pages: int, buckets: int, indexes: int) -> Pool:
    """An empty pool, of zeros: what is not written takes no memory where the system gives it late.

    Args:
        pages: of ``PAGE`` tokens, the first of them nobody's.
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
    """A hash of 32 bits, of one token more."""
    state = ((state ^ token) * 0x2C1B3C6D) & 0xFFFFFFFF
    return state ^ (state >> 15)


@compiled
def open_page(pool: Pool, index: int, before: int) -> int:
    """A page that goes on from ``before`` (0: from none); 0 if there is none left. Mutates."""
    counts = pool.counts[0]
    left, page = counts["free"], int(counts["fresh"])
    if left > 0:
        counts["free"] = left - 1
        page = int(pool.free[left - 1])
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
    """The position before one in its stream, or 0."""
    if slot & LAST:
        return slot - 1
    page = slot >> BITS
    before = int(pages[page]["before"])
    if before == 0 or pages[before]["after"] != page:
        return 0
    return before * PAGE + LAST


@compiled
def slot_after(pages: NDArray[Any], slot: int) -> int:
    """The position after one in its stream, or 0."""
    page, at = slot >> BITS, (slot & LAST) + 1
    if at < PAGE:
        return slot + 1 if at < pages[page]["filled"] else 0
    after = int(pages[page]["after"])
    if after == 0 or pages[after]["before"] != page or not pages[after]["filled"]:
        return 0
    return after * PAGE


@entry_point
def append(pool: Pool, index: int, page: int, tokens: Int32Array) -> int:
    """Write int32 ``tokens`` [n] to a stream. Mutates.

    Args:
        page: that its last token is in; 0 for a new stream.

    Returns:
        The page that its last token is in now; where no page was left for a token, it and those
        behind it are left out.
    """
    begin, mask = int(pool.indexes[index]["begin"]), int(pool.indexes[index]["mask"])
    text, chains, heads, pages = pool.text, pool.chains, pool.heads, pool.pages
    longest = ORDERS[-1]
    last = np.full(longest, END, np.int64)  # the newest first
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
    """Whether so many tokens of a request can be appended as they come: its streams have begun, and
    there is a page more for each."""
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
        Whether a page was begun, which is still to be booked.
    """
    row, counts = pool.indexes[index], pool.counts[0]
    before = counts["clock"]
    row["own"] = append(pool, index, row["own"], tokens)
    row["num_pages"] += counts["clock"] - before
    began, shared = counts["clock"], row["shared"]
    if shared > 0:
        row["output"] = append(pool, shared, row["output"], tokens)
        pool.indexes[shared]["num_pages"] += counts["clock"] - began
    return bool(counts["clock"] > before)


@entry_point
def give_page(pool: Pool, page: int) -> None:
    """Give up a page, whatever is in it. Mutates."""
    counts, given = pool.counts[0], pool.pages[page]
    given["owner"], given["before"], given["after"], given["filled"] = 0, 0, 0, 0
    pool.free[counts["free"]] = page
    counts["free"] += 1


@entry_point
def first_page(pool: Pool, page: int) -> int:
    """The oldest page of the stream that ``page`` is of."""
    before = page * PAGE
    while before > 0:
        page = before >> BITS
        before = slot_before(pool.pages, page * PAGE)
    return page


@entry_point
def give_stream(pool: Pool, page: int) -> int:
    """Give up the stream whose last page is ``page``; how many pages it had. Mutates."""
    given = 0
    while page > 0:
        before = slot_before(pool.pages, page * PAGE)
        give_page(pool, page)
        page = before >> BITS
        given += 1
    return given
