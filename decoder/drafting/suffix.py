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
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from decoder.drafting import pages as at
from decoder.drafting.blocks import Blocks
from decoder.drafting.drafts import CacheDraft, Limits, Tokens
from decoder.drafting.matches import BACK, Written, draft, scratch_for
from decoder.drafting.pages import Pool
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE, Shares, owner_of

STEP_TOKENS: Final = 32_768
"""Tokens of prompts indexed in a step: 1 to 3 ms."""
TOKEN_BYTES: Final = 4 + 4 * len(at.ORDERS) + 4 * len(at.ORDERS)
"""Bytes of a token in a full page: itself, its chains, and at most one bucket of each."""
PAGE_BYTES: Final = at.PAGE * TOKEN_BYTES + 64
LEAST: Final = 6
"""Buckets of the smallest index, as a power of two: no more than a page's tokens."""
TAKEN: Final = 16
"""Pages that a request under way loses at once."""
MEMORIES: Final = 16
"""Memories of payoffs may take one part in so many of what text may."""


@dataclass(slots=True)
class _Index:
    """A row of the pool's ``indexes``. Its buckets are 2**``size``; one without pages has none, and
    one that found none takes nobody's: its ``size`` is 0."""

    row: int
    owner: str
    size: int = 0
    booked: int = 0  # pages


@dataclass(slots=True)
class _Shared(_Index):
    """The outputs that requests of one key may copy from. ``users`` are active."""

    key: str = ""
    users: int = 0


@dataclass(slots=True)
class _Active:
    """A request under way: its own text and that in ``shared``; ``prompt`` is what is not indexed
    yet, and ``behind`` came meanwhile."""

    own: _Index
    shared: _Shared | None
    prompt: Tokens
    behind: list[int] = field(default_factory=list)
    output: int = 0  # the page of its output that is not to give way


class SuffixCache:
    """Text of the active requests and, by key, of outputs. For one thread.

    Attributes:
        limits: of its look-ups.
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
        self.limits = Limits(
            settings.suffix_max_depth, settings.suffix_max_draft, settings.suffix_max_factor,
            settings.suffix_max_offset, settings.suffix_min_prob,
        )  # fmt: skip
        self._budget = int(settings.cache_gib * 2**30)
        pages = max(self._budget // PAGE_BYTES, 4)
        size = max((pages * at.PAGE).bit_length(), LEAST)
        self.pool: Pool = at.new_pool(pages + 1, 1 << size, 256)
        self._blocks = Blocks(size)
        self._blocks.take(LEAST)  # nobody's
        self._rows = list(range(255, 0, -1))
        self._shares = Shares(self._budget, clock)
        self._active: dict[str, _Active] = {}
        self._shared: dict[str, _Shared] = {}
        self._outputs: dict[str, deque[tuple[_Shared, int]]] = {}  # by owner, oldest first
        self._waiting: deque[str] = deque()  # whose prompts are not indexed
        self.evicted = 0
        self.shed = 0

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

    def start(self, request: str, prompt: Tokens, key: str) -> int:
        """Begin a request; ``prompt`` (int32 [n], contiguous) is kept and indexed by :meth:`index`.

        Args:
            key: whose outputs it may copy from, and whose its own will be: one for all requests
                that share, see :func:`decoder.tenancy.shares.cache_key`.

        Returns:
            The index of its own text, by which :mod:`decoder.drafting.pages` knows it.

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
        row = self.pool.indexes[own.row]
        row["shared"], row["pending"] = shared.row if shared is not None else 0, len(prompt) > 0
        if len(prompt):
            self._waiting.append(request)
        return own.row

    def index(self, most: int | None = STEP_TOKENS) -> int:
        """Go on indexing prompts, the oldest first; to be called once a step.

        A draft proposed meanwhile copies from less text. Verification judges it like any other, so
        what is generated does not depend on it.

        Args:
            most: tokens of prompts; None for all there is.

        Returns:
            Tokens of prompts indexed.
        """
        done = 0
        while self._waiting and (most is None or done < most):
            active = self._active.get(self._waiting[0])
            if active is None or not len(active.prompt):
                self._waiting.popleft()
                continue
            count = at.PAGE * TAKEN if most is None else min(most - done, at.PAGE * TAKEN)
            part, active.prompt = active.prompt[:count], active.prompt[count:]
            done += len(part)
            if not len(active.prompt):
                active.prompt = active.prompt.copy()  # a view, even of nothing, holds all of it
                part, active.behind = np.append(part, np.array(active.behind, np.int32)), []
            self._append(active.own, active.own.row, "own", part)
            self.pool.indexes["pending"][active.own.row] = len(active.prompt) > 0
        return done

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Append committed tokens, to the request's own text and to its key's."""
        active = self._active[request]
        own, shared, text = active.own.row, active.shared, np.array(tokens, np.int32)
        if not len(text):
            return
        if len(active.prompt):
            active.behind += text.tolist()
        else:
            self._append(active.own, own, "own", text)
        if shared is None:
            return
        row = self.pool.indexes[own]
        if not row["output"] and (page := self._reopen(shared)):
            row["output"] = active.output = page
            text = np.concatenate([np.array([at.END], np.int32), text])
        self._append(shared, own, "output", text)
        self._leave_behind(active)

    def book(self, request: str) -> None:
        """Book the pages that were begun while committed tokens were appended as they came."""
        active = self._active.get(request)
        if active is None:
            return
        self._book(active.own)
        if active.shared is not None:
            self._book(active.shared)
            self._leave_behind(active)

    def propose(
        self, request: str, context: Tokens, limit: int, limits: Limits | None = None
    ) -> CacheDraft | None:
        """The best continuation of ``context`` (int32 [n]) of at most ``limit`` tokens, or None.

        Args:
            limits: in place of its own.
        """
        asked, own = limits or self.limits, self._active[request].own.row
        asked = asked._replace(most=min(limit, asked.most))
        seen, found = np.ascontiguousarray(context[-BACK:], np.int32), list[CacheDraft]()
        rows, size = self.pool.indexes, max(asked.most, 0)
        for index in (own, int(rows["shared"][own])):
            if not rows["num_pages"][index]:
                continue
            out = Written(np.empty(size, np.int32), np.empty(size, np.float32))
            made = draft(self.pool, index, seen, asked, out, scratch_for(size))
            if made.length:
                tokens, probs = (part[: made.length].tolist() for part in out)
                found.append(CacheDraft(tokens, probs, made.score, made.match, index == own))
        found.sort(key=lambda draft: -draft.score)  # of equals its own text's is first
        return replace(found[0], rival=found[1] if found[1:] else None) if found else None

    def stop(self, request: str) -> None:
        """Forget the request's own text; its output stays for its key until it gives way.

        A request that is not active is ignored.
        """
        active = self._active.pop(request, None)
        if active is None:
            return
        self._leave_behind(active)
        row = self.pool.indexes[active.own.row]
        self._drop_pages(active.own, at.give_stream(self.pool, int(row["own"])))
        self._rows.append(active.own.row)
        shared, output = active.shared, int(row["output"])
        for name in ("num_pages", "own", "output", "shared", "pending"):
            row[name] = 0
        if shared is not None:
            if output:
                self._close(shared, [output])
            shared.users -= 1
            self._leave_shared(shared)
        self._leave(active.own.owner)

    def _append(self, index: _Index, own: int, stream: str, tokens: Tokens) -> None:
        """Write to a ``stream`` of the request whose index is ``own``."""
        page, count = int(self.pool.indexes[stream][own]), len(tokens)
        filled = int(self.pool.pages["filled"][page]) if page else at.PAGE
        self._make_room((filled + count - 1) // at.PAGE)
        if not index.size:
            self._grow(index, count)
        rows, clock = self.pool.indexes, self.pool.counts["clock"]
        before = int(clock[0])
        rows[stream][own] = at.append(self.pool, index.row, page, tokens)
        rows["num_pages"][index.row] += int(clock[0]) - before
        self._book(index)

    def _book(self, index: _Index) -> None:
        """Book the pages that an index has got, and give it buckets for them."""
        pages = int(self.pool.indexes["num_pages"][index.row])
        if pages > index.booked:
            self._shares.grow(index.owner, (pages - index.booked) * PAGE_BYTES)
            index.booked = pages
            if pages * at.PAGE > 2 << index.size:
                self._grow(index, pages * at.PAGE)

    def _leave_behind(self, active: _Active) -> None:
        """Let pages that the output of a request has left give way from now on."""
        page = int(self.pool.indexes["output"][active.own.row])
        if page != active.output and active.shared is not None:
            self._close(active.shared, self._before(page, active.output))
            active.output = page

    def _before(self, page: int, first: int) -> list[int]:
        """The pages of a stream from ``first``, or from its beginning if that is 0, up to the one
        before ``page``."""
        pages = list[int]()
        while page not in (0, first):
            page = int(self.pool.pages["before"][page])
            pages.append(page)
        return [page for page in reversed(pages) if page]

    def _grow(self, index: _Index, tokens: int) -> None:
        """Give an index a bucket for each two of so many tokens, or more; fewer if there are none.

        A bucket's newest position stands in each of those that it becomes: their chains go on
        through it, past what is another's now.
        """
        old, size = index.size, max((tokens - 1).bit_length() - 1, LEAST)
        heads, row = self.pool.heads, self.pool.indexes[index.row]
        while (begin := self._blocks.take(size)) < 0:
            size -= 1
            if size <= old:
                if not old:
                    row["begin"] = row["mask"] = 0
                return
        block = heads[begin : begin + (1 << size)]
        if not old:
            block[:] = 0
        else:
            was = heads[row["begin"] : row["begin"] + (1 << old)]
            block.reshape(-1, *was.shape)[:] = was
            self._blocks.give(int(row["begin"]), old)
        row["begin"], row["mask"], index.size = begin, (1 << size) - 1, size

    def _drop_pages(self, index: _Index, pages: int) -> None:
        """Book that an index lost pages; without any it needs no buckets."""
        self._book(index)
        self.pool.indexes["num_pages"][index.row] -= pages
        index.booked -= pages
        self._shares.grow(index.owner, -pages * PAGE_BYTES)
        if not self.pool.indexes["num_pages"][index.row] and index.size:
            self._blocks.give(int(self.pool.indexes["begin"][index.row]), index.size)
            index.size = 0

    def _new_row(self) -> int:
        if not self._rows:
            rows = self.pool.indexes
            self._rows = list(range(2 * len(rows) - 1, len(rows) - 1, -1))
            self.pool = self.pool._replace(indexes=np.concatenate([rows, np.zeros_like(rows)]))
        return self._rows.pop()

    def _reopen(self, shared: _Shared) -> int:
        """The page of the output that ended last, if there is room in it; else 0."""
        outputs = self._outputs.get(shared.owner)
        if not outputs or outputs[-1][0] is not shared:
            return 0
        page = outputs[-1][1]
        last = self.pool.pages[page]
        if last["filled"] >= at.PAGE - 1 or last["after"]:
            return 0
        outputs.pop()
        last["closed"] = at.NEVER
        return page

    def _close(self, shared: _Shared, pages: Sequence[int]) -> None:
        """From now on ``pages`` may give way."""
        for page in pages:
            self.pool.pages["closed"][page] = self.pool.counts["clock"][0]
            self._outputs.setdefault(shared.owner, deque()).append((shared, page))

    def _make_room(self, pages: int) -> None:
        """Let outputs give way, then text of requests under way, until so many pages are free."""
        counts, last = self.pool.counts[0], len(self.pool.pages)
        while counts["free"] + last - counts["fresh"] < pages:
            if not self._shares.evict(self._take):
                return  # nothing but what is written at this moment

    def _take(self, owner: str) -> bool:
        """Give up the owner's oldest page of outputs or, without any, pages of its longest text
        under way."""
        outputs = self._outputs.get(owner)
        if outputs:
            shared, page = outputs.popleft()
            at.give_page(self.pool, page)
            self._drop_pages(shared, 1)
            self.evicted += 1
            self._leave_shared(shared)
            self._leave(owner)
            return True
        rows = self.pool.indexes
        mine = [
            a for a in self._active.values()
            if a.own.owner == owner and rows["num_pages"][a.own.row] > 1
        ]  # fmt: skip
        if not mine:
            return False
        longest = max(mine, key=lambda active: int(rows["num_pages"][active.own.row]))
        last = int(rows["own"][longest.own.row])
        page, taken = at.first_page(self.pool, last), 0
        while page != last and taken < TAKEN:
            after = int(self.pool.pages["after"][page])
            at.give_page(self.pool, page)
            page, taken = after, taken + 1
        self._drop_pages(longest.own, taken)
        self.shed += taken
        return taken > 0

    def _leave_shared(self, shared: _Shared) -> None:
        """Forget a key that has no text and that nobody uses."""
        if not shared.users and not self.pool.indexes["num_pages"][shared.row]:
            del self._shared[shared.key]
            self._rows.append(shared.row)

    def _leave(self, owner: str) -> None:
        """Forget an owner that holds nothing."""
        if not self._outputs.get(owner):
            self._outputs.pop(owner, None)
            if not self._shares.of(owner):
                self._shares.forget(owner)
