"""Where text has gone on before: a look-up among the pages of an index.

It follows the chain of the context's end to its ``MOST`` newest occurrences, measures how far back
each matches, and lets those that match furthest vote on every next token; probabilities, score,
limit and cut are those of SuffixDecoding (arXiv 2411.04975). The context's own end is an occurrence
too, with nothing behind it: one earlier occurrence has a probability of 1/2.

What a draft may show is what lies in pages of its own index, whatever a chain says.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Float32Array, Int32Array, compiled, entry_point
from decoder.drafting import pages as at
from decoder.drafting.drafts import Limits
from decoder.drafting.pages import Pool

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
AHEAD: Final = 8
"""Positions of a chain that are fetched before it is looked up. What a look-up waits for is memory,
one position after the other; those of many chains come at once."""


class Scratch(NamedTuple):
    """What :func:`draft` overwrites: occurrences, and a continuation that it tries."""

    found: Int32Array  # [MOST], positions where the context ends, the newest first
    lens: Int32Array  # [MOST], tokens that match before each
    slots: Int32Array  # [MOST], positions that vote
    votes: Int32Array  # [MOST], their tokens
    tokens: Int32Array  # [longest]
    probs: Float32Array  # [longest]


@entry_point
def scratch_for(most: int) -> Scratch:
    """Scratch memory for drafts of at most ``most`` tokens."""
    ids = np.empty((4, MOST), np.int32)
    tokens, probs = np.empty(most, np.int32), np.empty(most, np.float32)
    return Scratch(ids[0], ids[1], ids[2], ids[3], tokens, probs)


@compiled
def matched(pool: Pool, slot: int, context: NDArray[np.int32], most: int) -> int:
    """How many tokens, at most ``most``, end alike at a position and in ``context``."""
    length, count = len(context), 0
    while count < most and slot > 0 and pool.text[slot] == context[length - 1 - count]:
        count += 1
        slot = at.slot_before(pool.pages, slot)
    return count


@compiled
def newest(pool: Pool, index: int, context: NDArray[np.int32], order: int) -> int:
    """The newest position of the chain that the end of ``context`` is in, or 0."""
    state = 0
    for i in range(at.ORDERS[order]):
        state = at.mixed(state, int(context[len(context) - 1 - i]))
    row = pool.indexes[index]
    bucket = row["begin"] + (state & row["mask"])
    return int(pool.heads[bucket, order])


@compiled
def gather(
    pool: Pool,
    index: int,
    context: NDArray[np.int32],
    order: int,
    most: int,
    scratch: Scratch,
) -> tuple[int, int]:
    """Find where ``context`` ended before. Fills ``found`` and ``lens`` of ``scratch``.

    Args:
        order: of the chain to follow.
        most: tokens back at most.

    Returns:
        how many there are, and tokens looked at.
    """
    found, lens, chains, least = scratch.found, scratch.lens, pool.chains, at.ORDERS[order]
    slot, closed = newest(pool, index, context, order), at.NEVER
    count, full, last, work = 0, 0, -FULL, 0
    for _ in range(MOST * STEPS):
        if slot == 0 or count == MOST or full == FULL:
            break
        page = pool.pages[slot >> at.BITS]
        if page["owner"] != index or (slot & at.LAST) >= page["filled"] or page["born"] > closed:
            break  # written over since, and so is all that is older
        closed = page["closed"]
        work += 1
        if abs(slot - last) >= FULL:
            length = matched(pool, slot, context, most)
            work += length
            found[count], lens[count] = slot, length
            count += length >= least
            if length == BACK:
                full, last = full + 1, slot
        slot = int(chains[slot, order])
    return count, work


@compiled
def fetch(pool: Pool, slots: NDArray[np.int64]) -> None:
    """Have ``AHEAD`` positions of each of n chains in the processor's caches. Overwrites ``slots``,
    the newest of each, ``ORDERS`` one after the other."""
    seen = 0
    for _ in range(AHEAD):
        for i in range(len(slots)):
            seen += pool.text[slots[i]]
            slots[i] = pool.chains[slots[i], i % len(at.ORDERS)]
    slots[:1] = seen  # or nothing would be read


@compiled
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


@compiled
def vote(
    pool: Pool, count: int, limit: int, least: float, scratch: Scratch
) -> tuple[int, float, int]:
    """How the first ``count`` of ``slots`` go on, the most of them at each token; among equals the
    newest's. Fills ``tokens`` and ``probs`` of ``scratch``, and overwrites ``slots``.

    Args:
        limit: tokens at most.
        least: probability below which a draft does not go on.

    Returns:
        tokens, the sum of their probabilities, and tokens looked at.
    """
    slots, votes, text = scratch.slots, scratch.votes, pool.text
    length, score, prob, work = 0, 0.0, 1.0, 0
    while length < limit:
        going, same = 0, 0
        for i in range(count):
            slot = at.slot_after(pool.pages, int(slots[i]))
            if slot > 0 and text[slot] != at.END:
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
        # the end of a text says nothing of what follows
        prob *= most / (going if length else count)
        if prob < least:
            break
        scratch.tokens[length], scratch.probs[length] = best, prob
        score += prob
        length += 1
        count = going
        if most < going:
            count = 0
            for i in range(going):
                slots[count] = slots[i]
                count += votes[i] == best
    return length, score, work


@compiled
def foretold(pool: Pool, index: int, count: int) -> int:
    """Of the last ``count`` tokens of a request's own text, how many went on as the same tokens of
    the longest order had when they last came: a fact of the text, whoever drafted meanwhile."""
    text, pages, least = pool.text, pool.pages, at.ORDERS[-1]
    page, found = int(pool.indexes[index]["own"]), 0
    slot = page * at.PAGE + int(pages[page]["filled"]) - 1 if page else 0
    if pool.indexes[index]["pending"]:
        slot = 0  # the text is not in order yet
    for _ in range(count):
        before = at.slot_before(pages, slot) if slot > 0 else 0
        if before == 0:
            break
        earlier = int(pool.chains[before, len(at.ORDERS) - 1])
        for _ in range(STEPS):  # a bucket holds other tokens' positions, too
            if earlier == 0 or pages[earlier >> at.BITS]["owner"] != index:
                break
            same, mine, theirs = 0, before, earlier
            while same < least and mine > 0 and theirs > 0 and text[mine] == text[theirs]:
                same += 1
                mine, theirs = at.slot_before(pages, mine), at.slot_before(pages, theirs)
            if same == least:
                after = at.slot_after(pages, earlier)
                found += after > 0 and text[after] == text[slot]
                break
            earlier = int(pool.chains[earlier, len(at.ORDERS) - 1])
        slot = before
    return found


@compiled
def limit_of(match: int, limits: Limits) -> int:
    """Tokens of a draft behind ``match`` tokens."""
    length = int(max(match * limits.factor + limits.offset + 1e-6, 0.0))
    return min(limits.most, length, limits.depth - match)


@compiled
def widest(low: int, high: int, limits: Limits) -> int:
    """Tokens of a draft behind ``low`` to ``high`` tokens, at most."""
    limit = 0
    for match in range(low, high + 1):
        limit = max(limit, limit_of(match, limits))
    return limit


@compiled
def below(match: int, lens: NDArray[np.int32], count: int, least: int) -> int:
    """The greatest of ``count`` matches that are shorter than ``match``, or ``least``."""
    for i in range(count):
        least = max(least, lens[i] * (lens[i] < match))
    return least


class Continuation(NamedTuple):
    """A draft, and how it was found."""

    length: int  # tokens
    match: int  # tokens of context that it stands behind
    score: float  # the sum of its probabilities
    work: int  # tokens looked at


class Written(NamedTuple):
    """Where a draft is written to."""

    tokens: Int32Array  # [longest]
    probs: Float32Array  # [longest]


@entry_point
def draft(
    pool: Pool, index: int, context: Int32Array, limits: Limits, out: Written, scratch: Scratch
) -> Continuation:
    """The continuation with the highest score, of those behind each match length.

    Args:
        out: filled, as far as the draft is long.
        scratch: of :func:`scratch_for` drafts of ``limits.most`` tokens or more.
    """
    best, drafted, behind, work = 0.0, 0, 0, 0
    longest = min(len(context), BACK, limits.depth)
    for order in range(len(at.ORDERS) - 1, -1, -1):
        low = at.ORDERS[order]
        high = longest if order == len(at.ORDERS) - 1 else min(longest, at.ORDERS[order + 1] - 1)
        if widest(low, high, limits) <= best:
            continue
        count, looked = gather(pool, index, context, order, high, scratch)
        work += looked
        match = high + 1
        while work < WORK:
            match = below(match, scratch.lens, count, 0)
            if not match:
                break
            # behind these match lengths the same positions vote
            lower = below(match, scratch.lens, count, low - 1)
            limit = widest(lower + 1, match, limits)
            if limit <= best:
                continue
            voting = 0
            for i in range(count):
                scratch.slots[voting] = scratch.found[i]
                voting += scratch.lens[i] >= match
            length, score, looked = vote(pool, voting, limit, limits.least, scratch)
            work += looked
            if score > best:
                best, drafted, behind = score, length, match
                while limit_of(behind, limits) < length:
                    behind -= 1
                out.tokens[:length] = scratch.tokens[:length]
                out.probs[:length] = scratch.probs[:length]
    return Continuation(drafted, behind, best, work)
