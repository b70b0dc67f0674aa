"""Sliding windows of text with hash chains (as in LZ77 compressors) over the last 1, 2 or 3 tokens.

A window is a ring of pages that keeps the newest text of a request, or of the outputs of a key. A
*position* numbers a token among all that its window ever had. Each position links to the previous
one that ends in the same 1, 2 or 3 tokens (``ORDERS``). A link to a position before the window's
``first`` is dead.

A window grows by blocks, each as large as all before it, so no text is moved. Its hash buckets grow
by linear hashing (Litwin, VLDB 1980): a new page splits a few pages' buckets.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    Int32Array,
    Int32Matrix,
    Int64Array,
    bit_length,
    compiled,
    entry_point,
)

ORDERS: Final = (1, 2, 3)  # tokens shared by all positions of a chain
BITS: Final = 7
PAGE: Final = 1 << BITS  # positions that belong to one text
BUCKET: Final = 2
"""Slots of a window for each bucket of an order."""
END: Final = -1  # token between unrelated texts
LEVELS: Final = 24  # blocks of a window at most: positions are int32
SPLITS: Final = 4  # pages of buckets that are split when a page is opened
WINDOW: Final = np.dtype(
    [
        ("mask", "i8"),  # its number of slots, a power of two, - 1
        ("split", "i8"),  # slots whose buckets are in use
        ("first", "i8"),  # oldest position kept; page 0 is never used
        ("end", "i8"),  # position of the next page
        ("grow_at", "i8"),  # pages do not reach behind it before Python had a chance to grow it
        ("last", "i8"),  # newest token: of a request's text, or of a key's output that ended last
        ("users", "i8"),  # active requests of a key
        # the window of a request only
        ("own", "i8"),  # 1
        ("linked", "i8"),  # positions up to it are in the chains
        ("shared", "i8"),  # window of its key, 0 for none
        ("output", "i8"),  # its newest token in there, 0 for none
        (
            "blocks",
            "i4",
            (LEVELS,),
        ),  # by bits of a page's number: what to add for its page in the pool
    ],
    align=True,
)


class Pool(NamedTuple):
    """The memory of all windows; window 0 is "none"."""

    text: Int32Array  # [slots]
    chains: Int32Matrix  # [slots, orders], previous position
    heads: Int32Matrix  # [slots / BUCKET, orders], newest position of a bucket
    before: Int32Array  # [pages], last position of the text's previous page, or 0
    after: Int32Array  # [pages], first position of its next page, or 0
    windows: Annotated[NDArray[Any], WINDOW]
    lost: Int64Array  # [2], overwritten pages of keys' outputs and of requests' own text


def new_pool(pages: int, windows: int) -> Pool:
    """An empty, zeroed pool: the system allocates memory lazily, on the first write."""
    slots, orders = pages * PAGE, len(ORDERS)
    return Pool(
        np.zeros(slots, np.int32), np.zeros((slots, orders), np.int32),
        np.zeros((slots // BUCKET, orders), np.int32), np.zeros(pages, np.int32),
        np.zeros(pages, np.int32), np.zeros(windows, WINDOW), np.zeros(2, np.int64),
    )  # fmt: skip


@compiled
def mixed(state: int, token: int) -> int:
    """32-bit hash ``state``, updated with one token."""
    state = ((state ^ token) * 0x2C1B3C6D) & 0xFFFFFFFF
    return state ^ (state >> 15)


@compiled
def place_of(window: Any, offset: int) -> int:
    """Slot in the pool of a slot of a window."""
    return int((window["blocks"][bit_length(offset >> BITS)] << BITS) + offset)


@compiled
def bucket_of(window: Any, state: int) -> int:
    """Row of ``heads`` for the hash ``state`` of tokens."""
    mask = window["mask"]
    while mask and (state & mask) >= window["split"]:
        mask >>= 1
    return place_of(window, state & mask) // BUCKET


@compiled
def slot_of(window: Any, position: int) -> int:
    """Slot of a position."""
    return place_of(window, (position - PAGE) & window["mask"])


@compiled
def before(pool: Pool, window: Any, position: int) -> int:
    """Previous position of the text, or 0."""
    if position & (PAGE - 1):
        return position - 1
    linked = int(pool.before[slot_of(window, position) >> BITS])
    return linked if linked >= window["first"] else 0


@compiled
def after(pool: Pool, window: Any, position: int) -> int:
    """Next position of the text, or 0."""
    if (position + 1) & (PAGE - 1):
        return position + 1
    linked = int(pool.after[slot_of(window, position) >> BITS])
    return linked if linked >= window["first"] else 0


@entry_point
def discard(pool: Pool, index: int, first: int) -> None:
    """Forget a window's positions before ``first``. Mutates."""
    window = pool.windows[index]
    if first > window["first"]:
        pool.lost[window["own"]] += (first - window["first"]) >> BITS
        window["first"] = first


@compiled
def split_buckets(pool: Pool, index: int) -> None:
    """Split as many buckets of a window as ``SPLITS`` pages bring, until all are in use. Mutates.

    A bucket's newest position is copied to its second half. Their chains share the old positions;
    look-ups skip those of the other one.
    """
    window, size = pool.windows[index], PAGE // BUCKET
    for offset in range(
        window["split"], min(window["split"] + SPLITS * PAGE, window["mask"]), PAGE
    ):
        half = PAGE << (bit_length(offset >> BITS) - 1)
        source = place_of(window, offset - half) // BUCKET
        target = place_of(window, offset) // BUCKET
        pool.heads[target : target + size] = pool.heads[source : source + size]
        window["split"] = offset + PAGE


@compiled
def open_page(pool: Pool, index: int, last: int) -> int:
    """Open a page that continues the text whose newest token is ``last``, if that is still there;
    its first position. Mutates."""
    window = pool.windows[index]
    position = window["end"]
    window["end"] = position + PAGE
    discard(pool, index, window["end"] - window["mask"] - 1)
    split_buckets(pool, index)
    slot = slot_of(window, position)
    pool.text[slot : slot + PAGE] = END
    pool.before[slot >> BITS], pool.after[slot >> BITS] = 0, 0
    if last >= window["first"]:
        pool.before[slot >> BITS] = last
        pool.after[slot_of(window, last) >> BITS] = position
    return int(position)


@compiled
def link(pool: Pool, index: int, position: int) -> None:
    """Add a position to the chains of its window. Mutates."""
    window, back, state, order = pool.windows[index], position, 0, 0
    for tokens in range(1, ORDERS[-1] + 1):
        state = mixed(state, int(pool.text[slot_of(window, back)]) if back > 0 else END)
        back = before(pool, window, back) if back > 0 else 0
        if tokens == ORDERS[order]:
            bucket = bucket_of(window, state)
            pool.chains[slot_of(window, position), order] = pool.heads[bucket, order]
            pool.heads[bucket, order] = position
            order += 1


@entry_point
def write(pool: Pool, index: int, last: int, tokens: Int32Array, links: bool) -> int:
    """Append ``tokens`` to a text of a window whose newest token is at ``last``; 0, or one that is
    lost, begins a text. Overwrites the oldest pages. With ``links``, look-ups find the tokens at
    once. Returns the position of the last one. Mutates."""
    window = pool.windows[index]
    for i in range(len(tokens)):
        position = last + 1
        if last < window["first"] or position & (PAGE - 1) == 0:
            position = open_page(pool, index, last)
        pool.text[slot_of(window, position)] = tokens[i]
        if links:
            link(pool, index, position)
        last = position
    return last


@entry_point
def link_waiting(pool: Pool, index: int, most: int) -> int:
    """Add up to ``most`` positions of a request's text to the chains; their number. Mutates."""
    window = pool.windows[index]
    begin = max(window["linked"] + 1, window["first"])
    end = min(window["last"] + 1, begin + most)
    for position in range(begin, end):
        link(pool, index, position)
    window["linked"] = max(window["linked"], end - 1)
    return int(max(end - begin, 0))


@entry_point
def has_room(pool: Pool, index: int, last: int, count: int) -> bool:
    """Whether ``count`` more tokens of a text may be written before Python had a chance to grow its
    window."""
    window = pool.windows[index]
    filled = (last if last >= window["first"] else -1) & (PAGE - 1)
    pages = (filled + count) >> BITS
    return bool(pages == 0 or window["end"] + pages * PAGE <= window["grow_at"])


@compiled
def fits(pool: Pool, index: int, count: int) -> bool:
    """Whether :func:`extend` may append ``count`` tokens of a request."""
    window = pool.windows[index]
    if not has_room(pool, index, window["last"], count):
        return False
    shared = window["shared"]
    return shared == 0 or has_room(pool, shared, window["output"], count + 1)


@entry_point
def extend(pool: Pool, index: int, tokens: Int32Array) -> None:
    """Append committed tokens to a request's text and to its key's outputs. Mutates.

    Behind a prompt that is not linked yet they wait for :func:`link_waiting`.
    """
    window = pool.windows[index]
    links = window["linked"] == window["last"]
    window["last"] = write(pool, index, window["last"], tokens, links)
    if links:
        window["linked"] = window["last"]
    number = window["shared"]
    if number == 0:
        return
    shared = pool.windows[number]
    if window["output"] < shared["first"]:  # it begins, in the page of the one that ended last
        last, shared["last"] = shared["last"], 0
        window["output"] = write(pool, number, last, np.array([END], np.int32), True)
    window["output"] = write(pool, number, window["output"], tokens, True)


@entry_point
def restart(pool: Pool, index: int) -> None:
    """Empty a window. Mutates."""
    window = pool.windows[index]
    begin = place_of(window, 0) // BUCKET
    pool.heads[begin : begin + PAGE // BUCKET] = 0
    window["split"] = window["first"] = window["end"] = PAGE
    window["last"] = window["linked"] = 0
    window["grow_at"] = window["mask"] + 1 + PAGE


@entry_point
def halve(pool: Pool, index: int) -> None:
    """Keep the newer half of a window in all its blocks but the last. Mutates.

    Of two buckets that are joined the newer chain is kept.
    """
    window = pool.windows[index]
    slots = (window["mask"] + 1) >> 1
    discard(pool, index, window["end"] - slots)
    for position in range(window["first"], window["end"], PAGE):
        if (position - PAGE) & slots:
            source = slot_of(window, position)
            target = place_of(window, (position - PAGE) & (slots - 1))
            pool.text[target : target + PAGE] = pool.text[source : source + PAGE]
            pool.chains[target : target + PAGE] = pool.chains[source : source + PAGE]
            pool.before[target >> BITS] = pool.before[source >> BITS]
            pool.after[target >> BITS] = pool.after[source >> BITS]
    for offset in range(slots, window["split"], BUCKET):
        source, target = (
            place_of(window, offset) // BUCKET,
            place_of(window, offset - slots) // BUCKET,
        )
        for order in range(len(ORDERS)):
            pool.heads[target, order] = max(pool.heads[source, order], pool.heads[target, order])
    window["mask"], window["split"] = slots - 1, min(window["split"], slots)
