"""Suffix cache: drafts copied from the prompt or from earlier outputs.

SuffixDecoding (arXiv 2411.04975) over :mod:`decoder.drafting.pages`. A request has an index of its
own text. Outputs are shared by requests of one key: a tenant, or a tenant and a salt. Text is never
drafted across keys. All text is in one pool of bounded size, with a fair share for each tenant.
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
"""Prompt tokens indexed per step: 1 to 3 ms."""
TOKEN_BYTES: Final = 4 + 4 * len(at.ORDERS) + 4 * len(at.ORDERS)
"""Bytes per token of a full page: the token, its chain links, and at most one bucket per order."""
PAGE_BYTES: Final = at.PAGE * TOKEN_BYTES + 64
LEAST: Final = 6
"""log2 of the buckets of the smallest index: at most the tokens of a page."""
CHUNK: Final = 16
"""Pages that are indexed, or evicted from an active request, at a time."""
MEMORIES: Final = 16
"""Payoff memories may use 1/16 of the bytes that text may."""


@dataclass(slots=True)
class _Index:
    """A row of the pool's ``indexes``, with 2**``size`` buckets. ``size`` 0 means none of its own:
    it has no pages, or no block was free."""

    row: int
    owner: str
    size: int = 0
    booked: int = 0  # pages accounted to the owner


@dataclass(slots=True)
class _Shared(_Index):
    """Outputs that requests of one key may copy from."""

    key: str = ""
    users: int = 0  # active requests


@dataclass(slots=True)
class _Active:
    """An active request: its own index and that of its key."""

    own: _Index
    shared: _Shared | None
    prompt: Tokens  # the part that is not indexed yet
    behind: list[int] = field(default_factory=list)  # tokens committed meanwhile
    output: int = 0  # page of its output that must not be evicted


class SuffixCache:
    """Text of the active requests and, by key, of outputs. Not thread-safe.

    Attributes:
        limits: of its look-ups.
        evicted: evicted pages of outputs.
        shed: evicted pages of active requests' own text.
    """

    def __init__(
        self, settings: WorkerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin empty.

        Args:
            clock: seconds; a tenant idle for an hour may lose its guaranteed share to another.
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
        self._blocks.take(LEAST)  # reserved: buckets of index 0
        self._rows = list(range(255, 0, -1))
        self._shares = Shares(self._budget, clock)
        self._active: dict[str, _Active] = {}
        self._shared: dict[str, _Shared] = {}
        self._outputs: dict[str, deque[tuple[_Shared, int]]] = {}  # by owner, oldest first
        self._unindexed: deque[str] = deque()  # requests with prompts to index
        self.evicted = 0
        self.shed = 0

    @property
    def held_bytes(self) -> int:
        """Upper bound of the bytes of all text."""
        return self._shares.held

    @property
    def memory_bytes(self) -> int:
        """Bytes that payoff memories may use in addition to the text."""
        return self._budget // MEMORIES

    @property
    def waiting(self) -> int:
        """Requests whose prompts are not fully indexed."""
        return sum(len(active.prompt) > 0 for active in self._active.values())

    def start(self, request: str, prompt: Tokens, key: str) -> int:
        """Add a request. ``prompt`` (int32 [n], contiguous) is kept until :meth:`index` indexes it.

        Args:
            key: groups the requests that may copy from each other's outputs, see
                :func:`decoder.tenancy.shares.cache_key`.

        Returns:
            Row of its own index in the pool.

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
            self._unindexed.append(request)
        return own.row

    def index(self, most: int | None = STEP_TOKENS) -> int:
        """Index waiting prompts, oldest first; called once a step.

        Until then drafts copy from less text. Verification keeps the generated text independent of
        that.

        Args:
            most: maximum prompt tokens; None for all.

        Returns:
            Prompt tokens indexed.
        """
        done = 0
        while self._unindexed and (most is None or done < most):
            active = self._active.get(self._unindexed[0])
            if active is None or not len(active.prompt):
                self._unindexed.popleft()
                continue
            count = at.PAGE * CHUNK if most is None else min(most - done, at.PAGE * CHUNK)
            part, active.prompt = active.prompt[:count], active.prompt[count:]
            done += len(part)
            if not len(active.prompt):
                active.prompt = active.prompt.copy()  # an empty view would keep the prompt alive
                part, active.behind = np.append(part, np.array(active.behind, np.int32)), []
            self._append(active.own, active.own.row, "own", part)
            self.pool.indexes["pending"][active.own.row] = len(active.prompt) > 0
        return done

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Append committed tokens to the request's own text and to its key's."""
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
        self._release_filled(active)

    def book(self, request: str) -> None:
        """Account for pages that :func:`decoder.drafting.pages.append_both` opened."""
        active = self._active.get(request)
        if active is None:
            return
        self._account(active.own)
        if active.shared is not None:
            self._account(active.shared)
            self._release_filled(active)

    def propose(
        self, request: str, context: Tokens, limit: int, limits: Limits | None = None
    ) -> CacheDraft | None:
        """The best continuation of ``context`` (int32 [n]) of at most ``limit`` tokens, or None.

        Args:
            limits: replace :attr:`limits`.
        """
        bounds, own = limits or self.limits, self._active[request].own.row
        bounds = bounds._replace(most=min(limit, bounds.most))
        suffix, drafts = np.ascontiguousarray(context[-BACK:], np.int32), list[CacheDraft]()
        rows, size = self.pool.indexes, max(bounds.most, 0)
        for index in (own, int(rows["shared"][own])):
            if not rows["num_pages"][index]:
                continue
            out = Written(np.empty(size, np.int32), np.empty(size, np.float32))
            result = draft(self.pool, index, suffix, bounds, out, scratch_for(size))
            if result.length:
                tokens, probs = (part[: result.length].tolist() for part in out)
                drafts.append(CacheDraft(tokens, probs, result.score, result.match, index == own))
        drafts.sort(key=lambda draft: -draft.score)  # on a tie its own text's is first
        return replace(drafts[0], rival=drafts[1] if drafts[1:] else None) if drafts else None

    def stop(self, request: str) -> None:
        """Drop the request's own text; its output stays in its key's index until evicted.

        A request that is not active is ignored.
        """
        active = self._active.pop(request, None)
        if active is None:
            return
        self._release_filled(active)
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
            self._drop_shared(shared)
        self._drop_owner(active.own.owner)

    def _append(self, index: _Index, own: int, stream: str, tokens: Tokens) -> None:
        """Append to ``stream`` of the request with index row ``own``; the text is in ``index``."""
        page, count = int(self.pool.indexes[stream][own]), len(tokens)
        filled = int(self.pool.pages["filled"][page]) if page else at.PAGE
        self._make_room((filled + count - 1) // at.PAGE)
        if not index.size:
            self._grow(index, count)
        rows, clock = self.pool.indexes, self.pool.counts["clock"]
        before = int(clock[0])
        rows[stream][own] = at.append(self.pool, index.row, page, tokens)
        rows["num_pages"][index.row] += int(clock[0]) - before
        self._account(index)

    def _account(self, index: _Index) -> None:
        """Account for an index's new pages, and add buckets for them."""
        pages = int(self.pool.indexes["num_pages"][index.row])
        if pages > index.booked:
            self._shares.grow(index.owner, (pages - index.booked) * PAGE_BYTES)
            index.booked = pages
            if pages * at.PAGE > 2 << index.size:
                self._grow(index, pages * at.PAGE)

    def _release_filled(self, active: _Active) -> None:
        """Make the completed pages of a request's output evictable."""
        page = int(self.pool.indexes["output"][active.own.row])
        if page != active.output and active.shared is not None:
            self._close(active.shared, self._before(page, active.output))
            active.output = page

    def _before(self, page: int, first: int) -> list[int]:
        """Pages of a stream from ``first`` (0: its beginning) up to the one before ``page``."""
        pages = list[int]()
        while page not in (0, first):
            page = int(self.pool.pages["before"][page])
            pages.append(page)
        return [page for page in reversed(pages) if page]

    def _grow(self, index: _Index, tokens: int) -> None:
        """Grow an index to at least one bucket per two tokens, or as many as are free.

        When a bucket is split, its newest position is copied to each new bucket. Their chains share
        the old positions; look-ups skip those of the other buckets.
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
            heads_before = heads[row["begin"] : row["begin"] + (1 << old)]
            block.reshape(-1, *heads_before.shape)[:] = heads_before
            self._blocks.give(int(row["begin"]), old)
        row["begin"], row["mask"], index.size = begin, (1 << size) - 1, size

    def _drop_pages(self, index: _Index, pages: int) -> None:
        """Account for pages an index lost, and free its buckets with the last page."""
        self._account(index)
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
        """Last page of the output that ended last, if it has room; else 0."""
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
        """Make ``pages`` evictable."""
        for page in pages:
            self.pool.pages["closed"][page] = self.pool.counts["clock"][0]
            self._outputs.setdefault(shared.owner, deque()).append((shared, page))

    def _make_room(self, pages: int) -> None:
        """Evict outputs, then text of active requests, until ``pages`` are free."""
        counts, last = self.pool.counts[0], len(self.pool.pages)
        while counts["free"] + last - counts["fresh"] < pages:
            if not self._shares.evict(self._take):
                return  # all that is left is being written now

    def _take(self, owner: str) -> bool:
        """Evict the owner's oldest page of outputs or, without any, pages of its longest active
        text."""
        outputs = self._outputs.get(owner)
        if outputs:
            shared, page = outputs.popleft()
            at.give_page(self.pool, page)
            self._drop_pages(shared, 1)
            self.evicted += 1
            self._drop_shared(shared)
            self._drop_owner(owner)
            return True
        rows = self.pool.indexes
        candidates = [
            a for a in self._active.values()
            if a.own.owner == owner and rows["num_pages"][a.own.row] > 1
        ]  # fmt: skip
        if not candidates:
            return False
        longest = max(candidates, key=lambda active: int(rows["num_pages"][active.own.row]))
        last = int(rows["own"][longest.own.row])
        page, evicted = at.first_page(self.pool, last), 0
        while page != last and evicted < CHUNK:
            after = int(self.pool.pages["after"][page])
            at.give_page(self.pool, page)
            page, evicted = after, evicted + 1
        self._drop_pages(longest.own, evicted)
        self.shed += evicted
        return evicted > 0

    def _drop_shared(self, shared: _Shared) -> None:
        """Drop a key that has no text and no active requests."""
        if not shared.users and not self.pool.indexes["num_pages"][shared.row]:
            del self._shared[shared.key]
            self._rows.append(shared.row)

    def _drop_owner(self, owner: str) -> None:
        """Drop an owner without text."""
        if not self._outputs.get(owner):
            self._outputs.pop(owner, None)
            if not self._shares.of(owner):
                self._shares.forget(owner)
