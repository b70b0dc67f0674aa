"""Suffix cache: drafts copied from the prompt or from earlier outputs.

SuffixDecoding (arXiv 2411.04975) over :mod:`decoder.drafting.windows`. A request has a window of
its own text. Requests of one key, a tenant or a tenant and a salt, share a window of their outputs.
Text is never drafted across keys. All windows are in one pool of bounded size, with a fair share
for each tenant.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import numpy as np

from decoder.drafting import windows
from decoder.drafting.blocks import Blocks
from decoder.drafting.matches import Limits, Tokens
from decoder.drafting.windows import BUCKET, ORDERS, PAGE, Pool
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE, Shares, owner_of

STEP_TOKENS: Final = 32_768  # prompt tokens indexed per step: 1 to 3 ms
TOKEN_BYTES: Final = 4 + 4 * len(ORDERS) + 4 * len(ORDERS) // BUCKET
"""Bytes of a window per slot: the token, its chain links, and its part of a bucket per order."""
PAGE_BYTES: Final = PAGE * TOKEN_BYTES + 8
LARGEST: Final = 2
"""log2 of the windows of the largest size that fit into the pool."""
LAST: Final = 1 << 30  # position at which a window starts anew: positions are int32
MEMORIES: Final = 16  # payoff memories may use 1/16 of the bytes that text may


class SuffixCache:
    """Text of the active requests and, by key, of outputs. Not thread-safe.

    Attributes:
        limits: of its look-ups.
        memory_bytes: that payoff memories may use in addition to the text.
    """

    def __init__(
        self, settings: WorkerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin empty. By ``clock``, in seconds, a tenant idle for an hour may lose its guaranteed
        share to another."""
        self.limits = Limits(
            settings.suffix_max_depth, settings.suffix_max_draft, float(settings.suffix_max_factor),
            float(settings.suffix_max_offset), float(settings.suffix_min_prob),
        )  # fmt: skip
        budget = int(settings.cache_gib * 2**30)
        pages, self.memory_bytes = max(budget // PAGE_BYTES, 4), budget // MEMORIES
        self.pool: Pool = windows.new_pool(pages, pages + 1)  # each window has a page
        self._blocks = Blocks(pages)
        self._largest = min(max(pages.bit_length() - 1 - LARGEST, 0), windows.LEVELS - 1)
        self._new_rows = count(1)
        self._rows: list[int] = []  # of the windows that were dropped
        self._owners: dict[int, str] = {}  # of the windows in use
        self._shares = Shares(budget, clock)
        self._active: dict[str, int] = {}  # windows of active requests; 0 if there was no room
        self._keys: dict[str, OrderedDict[str, int]] = {}  # by owner and key, least recent first
        self._unlinked: deque[str] = deque()  # requests with prompts to index

    @property
    def held_bytes(self) -> int:
        """Bytes of all windows."""
        return self._shares.held

    @property
    def evicted(self) -> int:
        """Pages of outputs that were evicted or overwritten."""
        return int(self.pool.lost[0])

    @property
    def shed(self) -> int:
        """Pages that active requests lost of their own text."""
        return int(self.pool.lost[1])

    def start(self, request: str, prompt: Tokens, key: str) -> int:
        """Add a request. ``prompt`` (int32 [n], contiguous) is copied; :meth:`index` indexes it.

        Args:
            key: groups the requests that may copy from each other's outputs, see
                :func:`decoder.tenancy.shares.cache_key`.

        Returns:
            Number of its own window in the pool; 0 if there is no room for one.

        Raises:
            ValueError: the request is active already.
        """
        if request in self._active:
            raise ValueError(f"request {request!r} is active already")
        owner = owner_of(key)
        self._shares.visit(owner)
        if key in self._keys.get(owner, ()):
            self._keys[owner].move_to_end(key)
        row = self._active[request] = self._open(owner, len(prompt))
        if not row:
            return 0
        self.pool.windows["own"][row] = 1
        self.pool.windows["last"][row] = windows.write(self.pool, row, 0, prompt, False)
        self._unlinked.append(request)
        shared = 0
        if key != ALONE:
            keys = self._keys.get(owner, OrderedDict())
            shared = keys.get(key, 0) or self._open(owner, 0)
        if shared:
            self._keys.setdefault(owner, OrderedDict())[key] = shared
        self.pool.windows["shared"][row] = shared
        self.pool.windows["users"][shared] += 1
        return row

    def index(self, most: int | None = STEP_TOKENS) -> int:
        """Index at most ``most`` tokens of waiting prompts, oldest first, None for all; their
        number. Called once a step.

        Until then drafts copy from less text. Verification keeps the generated text independent of
        that.
        """
        done = 0
        while self._unlinked and (most is None or done < most):
            row = self._active.get(self._unlinked[0], 0)  # 0: it has ended
            if row:
                done += windows.link_waiting(self.pool, row, LAST if most is None else most - done)
            if not row or self.pool.windows["linked"][row] >= self.pool.windows["last"][row]:
                self._unlinked.popleft()
        return done

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Append committed tokens to the request's own text and to its key's."""
        row = self._active[request]
        if row and len(tokens):
            self.grow(request, len(tokens))
            windows.extend(self.pool, row, np.array(tokens, np.int32))

    def grow(self, request: str, count: int) -> None:
        """Grow the windows of a request that do not fit ``count`` more tokens where there is room;
        else they will overwrite their oldest. Mutates."""
        row = self._active[request]
        window = self.pool.windows[row]
        for number, last in ((row, "last"), (int(window["shared"]), "output")):
            while number and not windows.has_room(self.pool, number, int(window[last]), count + 1):
                self._enlarge(number, count + 1 + PAGE)

    def stop(self, request: str) -> None:
        """Drop the request's own text; its output stays in its key's window until evicted.

        A request that is not active is ignored.
        """
        row = self._active.get(request, 0)
        if row:
            window = self.pool.windows[row]
            shared = self.pool.windows[window["shared"]]
            shared["users"] -= 1
            shared["last"] = window["output"] or shared["last"]
            self._drop(row)
        self._active.pop(request, None)

    def _open(self, owner: str, tokens: int) -> int:
        """A new window for so many tokens, or fewer; 0 if there is no room at all."""
        size = min((tokens // PAGE).bit_length(), self._largest)
        while (page := self._allocate(owner, size)) < 0:
            if size == 0:
                return 0
            size -= 1
        row = self._rows.pop() if self._rows else next(self._new_rows)
        window = self.pool.windows[row]
        window["blocks"], window["mask"] = page, (PAGE << size) - 1
        windows.restart(self.pool, row)
        self._owners[row] = owner
        return row

    def _allocate(self, owner: str, size: int, outputs: bool = False) -> int:
        """A block of 2**``size`` pages, or -1 where as many are free but not in one piece.

        Evicts from the tenants that hold most; for ``outputs`` only from those that hold more than
        its own.
        """
        reached, all_bytes = False, PAGE_BYTES * len(self.pool.before)

        def evict(name: str) -> bool:
            nonlocal reached
            reached = outputs and name == owner
            return reached or self._evict(name)

        while (page := self._blocks.allocate(size)) < 0:
            if all_bytes - self._shares.held >= PAGE_BYTES << size:
                return -1
            if not self._shares.evict(evict) or reached:
                return -1
        self._shares.grow(owner, PAGE_BYTES << size)
        return page

    def _free(self, row: int, size: int) -> None:
        """Free the block of a window that doubled it to 2**``size`` pages, or its first page."""
        pages = 1 << max(size - 1, 0)
        begin = int(self.pool.windows["blocks"][row, size]) + (pages if size else 0)
        self._blocks.free(begin, pages.bit_length() - 1)
        self._shares.grow(self._owners[row], -PAGE_BYTES * pages)

    def _enlarge(self, row: int, more: int) -> None:
        """Double a window if there is room; else its oldest pages are overwritten for now.

        A ring can grow in its first, third, fifth ... lap: then all positions keep their slots.
        """
        window = self.pool.windows[row]
        slots, end = int(window["mask"]) + 1, int(window["end"])
        if end + more > LAST:
            windows.discard(self.pool, row, end)
            windows.restart(self.pool, row)
            active = [*self._active.values()]
            outputs = self.pool.windows["output"]
            outputs[active] *= self.pool.windows["shared"][active] != row
            return
        size, laps, page = (slots // PAGE).bit_length() - 1, -(-(end - PAGE) // slots), -1
        if size < self._largest and end <= window["grow_at"] and (laps % 2 or not laps):
            page = self._allocate(self._owners[row], size, outputs=not window["own"])
        if page < 0:
            _wait(window, end + max(slots, more))
        elif window["mask"] + 1 == slots:
            windows.discard(self.pool, row, (laps - 1) * slots + PAGE)
            window["blocks"][size + 1] = page - (1 << size)
            window["mask"] = 2 * slots - 1
            _wait(window, end)
        else:  # to make room the window was halved itself
            self._blocks.free(page, size)
            self._shares.grow(self._owners[row], -PAGE_BYTES << size)

    def _evict(self, owner: str) -> bool:
        """Evict the older half of the owner's least recent outputs or, if all its keys have active
        requests, of its largest window."""
        keys, masks = self._keys.get(owner, OrderedDict()), self.pool.windows["mask"]
        idle = next((key for key in keys if not self.pool.windows["users"][keys[key]]), None)
        if idle is not None:
            row = keys[idle]
            if masks[row] >= PAGE:
                self._halve(row)
                return True
            del keys[idle]
            if not keys:
                del self._keys[owner]
            windows.discard(self.pool, row, int(self.pool.windows["end"][row]))
            self._drop(row)
            return True
        rows = [row for row in self._active.values() if self._owners.get(row) == owner]
        largest = max([*rows, *keys.values()], key=masks.__getitem__, default=0)
        if masks[largest] < PAGE:
            return False
        self._halve(largest)
        return True

    def _halve(self, row: int) -> None:
        window = self.pool.windows[row]
        size = ((int(window["mask"]) + 1) // PAGE).bit_length() - 1
        windows.halve(self.pool, row)
        _wait(window, int(window["end"] + window["mask"] + 1))
        self._free(row, size)

    def _drop(self, row: int) -> None:
        """Free a window, and forget its owner with its last."""
        for size in range(((int(self.pool.windows["mask"][row]) + 1) // PAGE).bit_length()):
            self._free(row, size)
        owner = self._owners.pop(row)
        self.pool.windows[row] = np.zeros((), windows.WINDOW)
        self._rows.append(row)
        if not self._shares.of(owner):
            self._shares.forget(owner)


def _wait(window: Any, position: int) -> None:
    """Let a window grow when an odd lap of its ring ends at ``position`` or later. Mutates."""
    slots = int(window["mask"]) + 1
    window["grow_at"] = (position - PAGE + slots - 1) // (2 * slots) * 2 * slots + slots + PAGE
