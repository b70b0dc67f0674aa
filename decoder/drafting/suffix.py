"""Cache drafts: continuations copied from the prompt or from earlier outputs.

SuffixDecoding (arXiv 2411.04975) over :mod:`decoder.drafting.pages`. A request has an index of its
own text, and what it shares it shares under a key: a tenant, or a tenant and a salt. One key's
text never becomes another's draft. All text lies in one pool of bounded bytes, and a tenant has its
fair share of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from decoder.drafting.drafts import CacheDraft, Limits, Tokens, common_prefix
from decoder.drafting.matches import BACK, look_up
from decoder.drafting.pages import (
    AFTER,
    BEFORE,
    BEGIN,
    END,
    FILLED,
    FREE,
    FRESH,
    MASK,
    ORDERS,
    PAGE,
    append_all,
    close_page,
    first_page,
    give_page,
    give_stream,
    new_pool,
)
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE, Shares, owner_of

STEP_TOKENS: Final = 32_768
"""Tokens of prompts indexed in a step: 1 to 3 ms."""
TOKEN_BYTES: Final = 4 + 4 * len(ORDERS) + 4 * len(ORDERS)
"""Bytes of a token in a full page: itself, its chains, and at most one bucket of each."""
PAGE_BYTES: Final = PAGE * TOKEN_BYTES + 64
LEAST: Final = 6
"""Buckets of the smallest index, as a power of two: no more than a page's tokens."""
TAKEN: Final = 16
"""Pages that a request under way loses at once."""
MEMORIES: Final = 16
"""Memories of payoffs may take one part in so many of what text may."""


class Blocks:
    """Parts of an array whose sizes are powers of two, split and joined as buddies."""

    def __init__(self, size: int) -> None:
        """One free block of 2**``size``."""
        self._free: list[set[int]] = [set() for _ in range(size)] + [{0}]

    def take(self, size: int) -> int:
        """Where a free block of 2**``size`` begins, -1 if there is none; the first of the smallest
        that will do. Mutates."""
        for larger in range(size, len(self._free)):
            if self._free[larger]:
                begin = min(self._free[larger])
                self._free[larger].remove(begin)
                for half in range(size, larger):
                    self._free[half].add(begin + (1 << half))
                return begin
        return -1

    def give(self, begin: int, size: int) -> None:
        """Give back what was taken. Mutates."""
        while begin ^ (1 << size) in self._free[size]:
            self._free[size].remove(begin ^ (1 << size))
            begin &= ~(1 << size)
            size += 1
        self._free[size].add(begin)


@dataclass(slots=True)
class _Index:
    """A row of the pool's ``indexes``, and how many pages are in it. Its buckets are 2**``size``;
    one without pages has none, and one that found none takes nobody's: its ``size`` is 0."""

    row: int
    owner: str
    pages: int = 0
    size: int = 0


@dataclass(slots=True)
class _Shared(_Index):
    """The outputs that requests of one key may copy from. ``users`` are active."""

    key: str = ""
    users: int = 0


@dataclass(slots=True)
class _Active:
    """A request under way: its own text, the last page of it, and that of its output in
    ``shared``; ``prompt`` is what is not indexed yet, ``behind`` came meanwhile, and ``written`` is
    to be appended."""

    own: _Index
    shared: _Shared | None
    prompt: Tokens
    behind: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    page: int = 0
    output: int = 0


class SuffixCache:
    """Text of the active requests and, by key, of outputs. For one thread.

    Attributes:
        most: tokens of a draft at most.
        depth: tokens of context and draft together.
        limits: of a draft, as :class:`Limits` has them.
        evicted: pages of outputs that gave way to others.
        shed: pages that requests under way lost of their own text.
    """

    def __init__(
        self, settings: WorkerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin empty.

        Args:
            clock: seconds; a tenant that was idle for an hour may lose its floor to another.
        """
        s = settings
        self.depth, self.most = s.suffix_max_depth, s.suffix_max_draft
        self.limits = (s.suffix_max_factor, s.suffix_max_offset, s.suffix_min_prob)
        self._budget = int(s.cache_gib * 2**30)
        pages = max(self._budget // PAGE_BYTES, 4)
        size = max((pages * PAGE).bit_length(), LEAST)
        self._pool = new_pool(pages + 1, 1 << size, 256)
        self._blocks = Blocks(size)
        self._blocks.take(LEAST)  # nobody's
        self._rows = list(range(255, 0, -1))
        self._shares = Shares(self._budget, clock)
        self._active: dict[str, _Active] = {}
        self._shared: dict[str, _Shared] = {}
        self._outputs: dict[str, deque[tuple[_Shared, int]]] = {}  # by owner, oldest first
        self._waiting: deque[str] = deque()  # whose prompts are not indexed
        self._written: dict[str, None] = {}  # who has something to append, in their order
        self.evicted = 0
        self.shed = 0

    def __contains__(self, request: str) -> bool:
        return request in self._active

    @property
    def held_bytes(self) -> int:
        """Bytes of all text at most."""
        return self._shares.held

    @property
    def memory_bytes(self) -> int:
        """Bytes that memories of payoffs may take beside the text."""
        return self._budget // MEMORIES

    @property
    def waiting(self) -> int:
        """Requests whose prompts are not wholly indexed."""
        return sum(len(active.prompt) > 0 for active in self._active.values())

    def start(self, request: str, prompt: Tokens, key: str) -> None:
        """Begin a request; ``prompt`` (int32 [n], contiguous) is kept and indexed by :meth:`index`.

        Args:
            key: whose outputs it may copy from, and whose its own will be: one for all requests
                that share, see :func:`decoder.tenancy.shares.cache_key`.

        Raises:
            ValueError: the request is active already.
        """
        if request in self._active:
            raise ValueError(f"request {request!r} is active already")
        owner = owner_of(key)
        self._shares.visit(owner)
        shared = None
        if key != ALONE:
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(self._new_row(), owner, key=key)
            shared.users += 1
        own = _Index(self._new_row(), owner)
        self._active[request] = _Active(own, shared, prompt)
        if len(prompt):
            self._waiting.append(request)

    def index(self, most: int | None = STEP_TOKENS) -> int:
        """Go on indexing prompts, the oldest first; to be called once a step.

        A draft proposed meanwhile copies from less text. Verification judges it like any other, so
        what is generated does not depend on it.

        Args:
            most: tokens of prompts; None for all there is.

        Returns:
            Tokens of prompts indexed.
        """
        self.write()
        done = 0
        while self._waiting and (most is None or done < most):
            active = self._active.get(self._waiting[0])
            if active is None or not len(active.prompt):
                self._waiting.popleft()
                continue
            count = PAGE * TAKEN if most is None else min(most - done, PAGE * TAKEN)
            part, active.prompt = active.prompt[:count], active.prompt[count:]
            done += len(part)
            if not len(active.prompt):
                part, active.behind = np.append(part, np.array(active.behind, np.int32)), []
            (active.page,) = self._append([active.own], [active.page], part, [len(part)])
        return done

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Append committed tokens, to the request's own text and to its key's.

        They are written by :meth:`write`, for all requests together, or before anything is looked
        up or forgotten.
        """
        self._active[request].written += tokens
        self._written[request] = None

    def write(self) -> None:
        """Append what was committed since the last time; to be called once a step."""
        if not self._written:
            return
        streams: list[tuple[_Active, _Index]] = []
        pages: list[int] = []
        tokens: list[int] = []
        ends: list[int] = []
        for name in self._written:
            active = self._active[name]
            written, active.written = active.written, []
            if len(active.prompt):
                active.behind += written
            elif written:
                tokens += written
                streams.append((active, active.own))
                pages.append(active.page)
                ends.append(len(tokens))
            shared = active.shared
            if shared is not None and written:
                if not active.output and (page := self._reopen(shared)):
                    active.output = page
                    tokens.append(END)
                tokens += written
                streams.append((active, shared))
                pages.append(active.output)
                ends.append(len(tokens))
        self._written.clear()
        if not streams:
            return
        for (active, index), page in zip(
            streams, self._append([i for _, i in streams], pages, tokens, ends), strict=True
        ):
            if index is active.own:
                active.page = page
            elif page != active.output and (shared := active.shared) is not None:
                self._close(shared, self._before(page, active.output))
                active.output = page

    def propose(
        self, request: str, context: Tokens, limit: int, limits: Limits | None = None
    ) -> CacheDraft | None:
        """The best continuation of ``context`` (int32 [n]) of at most ``limit`` tokens, or None.

        Args:
            limits: in place of its own.
        """
        return self.propose_all([request], [context], [limit], limits)[0]

    def propose_all(
        self,
        requests: Sequence[str],
        contexts: Sequence[Tokens],
        most: Sequence[int],
        limits: Limits | None = None,
    ) -> list[CacheDraft | None]:
        """:meth:`propose` for n requests, looked up together."""
        self.write()
        asked, n = limits or Limits(self.depth, self.most, self.limits), len(requests)
        indexes, lengths = np.empty((n, 2), np.int64), np.empty(n, np.int64)
        seen = np.empty((n, BACK), np.int32)
        for row, (name, context) in enumerate(zip(requests, contexts, strict=True)):
            active = self._active[name]
            shared = active.shared
            indexes[row, 0] = active.own.row if active.own.pages else 0
            indexes[row, 1] = shared.row if shared is not None and shared.pages else 0
            lengths[row] = length = min(len(context), BACK)
            seen[row, :length] = context[len(context) - length :]
        tokens, probs = np.empty((n, 2, asked.most), np.int32), np.empty((n, 2, asked.most), "f4")
        sizes, scores = np.empty((n, 2, 2), np.int64), np.empty((n, 2))
        look_up(
            self._pool, indexes, seen, lengths, np.array(most, np.int64), asked.depth,
            asked.of_draft, tokens, probs, sizes, scores,
        )  # fmt: skip
        drafts: list[CacheDraft | None] = []
        for row, found in enumerate(sizes.tolist()):
            own, theirs = (
                CacheDraft(
                    tokens[row, k, :size].tolist(), probs[row, k, :size].tolist(),
                    scores.item(row, k), match, local=not k,
                )
                if size else None
                for k, (size, match) in enumerate(found)
            )  # fmt: skip
            drafts.append(_better(own, theirs))
        return drafts

    def stop(self, request: str) -> None:
        """Forget the request's own text; its output stays for its key until it gives way.

        A request that is not active is ignored.
        """
        if request not in self._active:
            return
        self.write()
        active = self._active.pop(request)
        self._drop_pages(active.own, give_stream(self._pool, active.page))
        self._rows.append(active.own.row)
        shared = active.shared
        if shared is not None:
            if active.output:
                self._close(shared, [active.output])
            shared.users -= 1
            self._leave_shared(shared)
        self._leave(active.own.owner)

    def _append(
        self,
        indexes: Sequence[_Index],
        pages: Sequence[int],
        tokens: Sequence[int] | Tokens,
        ends: Sequence[int],
    ) -> list[int]:
        """Write to streams of ``indexes`` whose last pages are ``pages``; their last pages then."""
        last, until = np.array(pages, np.int64), np.array(ends, np.int64)
        lengths = np.diff(until, prepend=0)
        held = np.where(last > 0, self._pool.links[last, FILLED], PAGE)
        self._make_room(int(((held + lengths - 1) // PAGE).sum()))
        for index, length in zip(indexes, lengths.tolist(), strict=True):
            if not index.size:
                self._grow(index, length)
        opened, rows = np.empty_like(until), np.array([i.row for i in indexes], np.int64)
        append_all(self._pool, rows, last, np.asarray(tokens, np.int32), until, opened)
        for row in np.flatnonzero(opened).tolist():
            index, count = indexes[row], int(opened[row])
            index.pages += count
            self._shares.grow(index.owner, count * PAGE_BYTES)
            if index.pages * PAGE > 2 << index.size:
                self._grow(index, index.pages * PAGE)
        return [int(page) for page in last]

    def _before(self, page: int, first: int) -> list[int]:
        """The pages of a stream from ``first``, or from its beginning if that is 0, up to the one
        before ``page``."""
        pages = list[int]()
        while page not in (0, first):
            page = int(self._pool.links[page, BEFORE])
            pages.append(page)
        return [page for page in reversed(pages) if page]

    def _grow(self, index: _Index, tokens: int) -> None:
        """Give an index a bucket for each two of so many tokens, or more; fewer if there are none.

        A bucket's newest position stands in each of those that it becomes: their chains go on
        through it, past what is another's now.
        """
        old, size = index.size, max((tokens - 1).bit_length() - 1, LEAST)
        heads, row = self._pool.heads, self._pool.indexes[index.row]
        while (begin := self._blocks.take(size)) < 0:
            size -= 1
            if size <= old:
                if not old:
                    row[:] = 0
                return
        block = heads[begin : begin + (1 << size)]
        if not old:
            block[:] = 0
        else:
            was = heads[row[BEGIN] : row[BEGIN] + (1 << old)]
            block.reshape(-1, *was.shape)[:] = was
            self._blocks.give(int(row[BEGIN]), old)
        row[BEGIN], row[MASK], index.size = begin, (1 << size) - 1, size

    def _drop_pages(self, index: _Index, pages: int) -> None:
        """Book that an index lost pages; without any it needs no buckets."""
        index.pages -= pages
        self._shares.grow(index.owner, -pages * PAGE_BYTES)
        if not index.pages and index.size:
            self._blocks.give(int(self._pool.indexes[index.row, BEGIN]), index.size)
            index.size = 0

    def _new_row(self) -> int:
        if not self._rows:
            rows = self._pool.indexes
            self._rows = list(range(2 * len(rows) - 1, len(rows) - 1, -1))
            self._pool = self._pool._replace(indexes=np.concatenate([rows, np.zeros_like(rows)]))
        return self._rows.pop()

    def _reopen(self, shared: _Shared) -> int:
        """The page of the output that ended last, if there is room in it; else 0."""
        outputs = self._outputs.get(shared.owner)
        if not outputs or outputs[-1][0] is not shared:
            return 0
        page = outputs[-1][1]
        if self._pool.links[page, FILLED] >= PAGE - 1 or self._pool.links[page, AFTER]:
            return 0
        outputs.pop()
        close_page(self._pool, page, False)
        return page

    def _close(self, shared: _Shared, pages: Sequence[int]) -> None:
        """From now on ``pages`` may give way."""
        for page in pages:
            close_page(self._pool, page, True)
            self._outputs.setdefault(shared.owner, deque()).append((shared, page))

    def _make_room(self, pages: int) -> None:
        """Let outputs give way, then text of requests under way, until so many pages are free."""
        counts, last = self._pool.counts, len(self._pool.links)
        while counts[FREE] + last - counts[FRESH] < pages:
            if not self._shares.give_way(self._take):
                return  # nothing but what is written at this moment

    def _take(self, owner: str) -> bool:
        """Give up the owner's oldest page of outputs or, without any, pages of its longest text
        under way."""
        outputs = self._outputs.get(owner)
        if outputs:
            shared, page = outputs.popleft()
            give_page(self._pool, page)
            self._drop_pages(shared, 1)
            self.evicted += 1
            self._leave_shared(shared)
            self._leave(owner)
            return True
        mine = [a for a in self._active.values() if a.own.owner == owner and a.own.pages > 1]
        if not mine:
            return False
        longest = max(mine, key=lambda active: active.own.pages)
        page, taken = first_page(self._pool, longest.page), 0
        while page != longest.page and taken < TAKEN:
            after = int(self._pool.links[page, AFTER])
            give_page(self._pool, page)
            page, taken = after, taken + 1
        self._drop_pages(longest.own, taken)
        self.shed += taken
        return taken > 0

    def _leave_shared(self, shared: _Shared) -> None:
        """Forget a key that has no text and that nobody uses."""
        if not shared.users and not shared.pages:
            del self._shared[shared.key]
            self._rows.append(shared.row)

    def _leave(self, owner: str) -> None:
        """Forget an owner that holds nothing."""
        if not self._outputs.get(owner):
            self._outputs.pop(owner, None)
            if not self._shares.of(owner):
                self._shares.forget(owner)


def _better(own: CacheDraft | None, theirs: CacheDraft | None) -> CacheDraft | None:
    """The draft that expects more, beside the other."""
    if own is None or theirs is None:
        return own or theirs
    best, rival = (own, theirs) if own.score >= theirs.score else (theirs, own)
    agreement = common_prefix(best.tokens, rival.tokens)
    return CacheDraft(
        best.tokens, best.probs, best.score, best.match_len, best.local, rival, agreement
    )
