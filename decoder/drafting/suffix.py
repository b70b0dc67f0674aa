"""Cache drafts: continuations copied from the prompt or from earlier outputs.

A thin room around ArcticInference's suffix trees (SuffixDecoding, arXiv 2411.04975). A request has
a tree of its own, and what it shares it shares under a key: a tenant, or a tenant and a salt. One
key's text never becomes another's draft. All trees together are bounded in bytes, and a tenant's
by its fair share.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from decoder.drafting.drafts import CacheDraft, Limits, better_of, reach_of
from decoder.drafting.trees import (
    OVERLAP,
    SEGMENT,
    TREE_BYTES,
    Dead,
    Graveyard,
    Local,
    Shared,
    Tokens,
    bytes_of,
)
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE, Shares, owner_of

FREED: Final = 4
"""Tokens freed for each one written, while more is held than may be."""
STEP_TOKENS: Final = 2048
"""Tokens indexed in a step, or as much freed, where the target read no more than that: 1.5 to 4 ms.
With 256, a lone agent whose prompts lay in the prefix cache had 3.1 tokens a cycle, of 3.9."""
SLACK: Final = 8
"""This part of the budget, one of so many, is kept for what is given up and not yet freed."""
MEMORIES: Final = 16
"""Memories of payoffs may take one part in so many of what the trees may."""
EVERYTHING: Final = 1 << 62


@dataclass(slots=True)
class _Active:
    """A request under way. ``local`` is None once it has lost its tree to the budget."""

    owner: str
    local: Local | None
    shared: Shared | None
    recent: list[int]  # the last tokens of its text, ``last`` not among them
    held: int  # bytes booked for ``local``
    sequence: int = -1  # of the shared tree, that its output goes into
    written: int = 0  # tokens in it
    reach: int = EVERYTHING  # tokens of context that the next lookup takes


class SuffixCache:
    """Suffix trees of the active requests and, by key, of outputs. For one thread.

    Attributes:
        most: tokens of a draft at most.
        limits: of a draft, as :func:`better_of` takes them.
        evicted: segments of outputs that gave way to others.
        shed: requests under way that lost their own tree.
    """

    def __init__(
        self, settings: WorkerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin empty.

        Args:
            clock: seconds; a tenant that was idle for an hour may lose its floor to another.
        """
        # Late: loads a library that nobody needs who only reads drafts.
        from arctic_inference.suffix_decoding._C import SuffixTree

        s = settings
        self._new_tree: Callable[[int], Any] = SuffixTree
        self.depth, self.most = s.suffix_max_depth, s.suffix_max_draft
        self.limits = (s.suffix_max_factor, s.suffix_max_offset, s.suffix_min_prob)
        self._budget = int(s.cache_gib * 2**30)
        self._shares = Shares(self._budget - self._budget // SLACK, clock)
        self._active: dict[str, _Active] = {}
        self._shared: dict[str, Shared] = {}
        self._outputs: dict[str, deque[tuple[Shared, int, int]]] = {}  # by owner, oldest first
        self._fresh: deque[str] = deque()  # prompts whose ends are not indexed
        self._waiting: deque[str] = deque()  # those whose beginnings are not
        self._graveyard = Graveyard()
        self._frees = False
        self._written = 0  # tokens of output since the last call of index
        self.evicted = 0
        self.shed = 0

    def __contains__(self, request: str) -> bool:
        return request in self._active

    @property
    def held_bytes(self) -> int:
        """Bytes of all trees at most, those among them that wait to be freed."""
        return self._shares.held + self._graveyard.held

    @property
    def memory_bytes(self) -> int:
        """Bytes that memories of payoffs may take beside the trees."""
        return self._budget // MEMORIES

    @property
    def waiting(self) -> int:
        """Requests whose prompts are not wholly indexed."""
        return len(self._fresh) + len(self._waiting)

    def start(self, request: str, prompt: Tokens, key: str) -> None:
        """Begin a request; ``prompt`` (int32 [n], contiguous) is indexed by :meth:`index`.

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
        local = Local(self._new_tree(self.depth), prompt)
        shared = None if key == ALONE else self._shared_of(key, owner)
        if shared is not None:
            shared.users += 1
        recent = prompt[-OVERLAP:].tolist()
        self._active[request] = _Active(owner, local, shared, recent, TREE_BYTES)
        self._shares.grow(owner, TREE_BYTES)
        if local.backlog is not None:
            self._fresh.append(request)

    def index(self, most: int | None = STEP_TOKENS) -> int:
        """Go on indexing prompts and freeing what nobody uses; to be called once a step.

        A draft proposed meanwhile copies from less text. Verification judges it like any other, so
        what is generated does not depend on it. Ends of prompts come first, and the newest prompt,
        whose answer is the longest still to come.

        Args:
            most: tokens. Freeing takes turns with it, and counts as what could have been indexed
                in its time, but keeps up with what is written whatever that takes. None for all
                there is.

        Returns:
            Tokens indexed.
        """
        if self._shares.held > self._shares.budget:
            self._make_room()
        left = EVERYTHING if most is None else most
        self._frees = not self._frees
        full = self.held_bytes > self._budget
        if self._graveyard and (self._frees or full or not self.waiting or not most):
            # What is written goes into two trees, and one step in two may not be one that frees.
            due = FREED * self._written if full else 0
            left -= min(self._graveyard.free(max(left, due)), left)
        self._written = 0
        if most is not None:
            return 0 if full else self._index(left)
        return self._index(EVERYTHING)

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Append committed tokens. Mutates the request's tree and its key's."""
        active = self._active[request]
        active.reach += len(tokens)
        self._written += len(tokens)
        grown = 0
        if active.local is not None:
            before = active.local.sequences
            count = active.local.extend(tokens, active.recent)
            grown = bytes_of(count, active.local.sequences - before)
            active.held += grown
        if active.shared is not None and tokens:
            grown += self._share(active, active.shared, tokens)
        active.recent += tokens
        if len(active.recent) > SEGMENT:
            del active.recent[:-OVERLAP]
        self._shares.grow(active.owner, grown)

    def propose(
        self,
        request: str,
        context: Tokens,
        limit: int,
        limits: Limits | None = None,
    ) -> CacheDraft | None:
        """The best continuation of ``context`` (int32 [n]) of at most ``limit`` tokens, or None.

        Args:
            limits: in place of its own; what later lookups find does not hang on such a one.
        """
        active = self._active[request]
        shared = active.shared
        reach = min(active.reach, self.depth)
        asked = limits or Limits(reach, self.most, self.limits)
        draft, matched = better_of(
            None if active.local is None else active.local.tree,
            None if shared is None or not shared.sequences else shared.tree,
            context[-asked.depth :], min(limit, asked.most), asked.of_draft,
        )  # fmt: skip
        if limits is None:
            active.reach = reach_of(matched)
        return draft

    def stop(self, request: str) -> None:
        """Forget the request's own tree; its output stays for its key until it gives way.

        A request that is not active is ignored.
        """
        active = self._active.pop(request, None)
        if active is None:
            return
        if active.local is not None:
            if active.local.backlog is not None:
                queue = self._waiting if active.local.follows else self._fresh
                with suppress(ValueError):  # it is out for a slice that failed
                    queue.remove(request)
            self._bury(active)
        shared = active.shared
        if shared is not None:
            self._close(active, shared)
            shared.users -= 1
            self._drop(shared)
        self._leave(active.owner)

    def _index(self, most: int) -> int:
        left = most
        while left > 0 and (queue := self._fresh or self._waiting):
            name = queue.pop()
            active = self._active.get(name)
            if active is None or active.local is None or active.local.backlog is None:
                continue
            local = active.local
            before = local.sequences
            count = local.index(left)
            active.reach = EVERYTHING  # what is new in the tree may match any stretch
            grown = bytes_of(count, local.sequences - before)
            active.held += grown
            self._shares.grow(active.owner, grown)
            left -= count
            if not local.follows:
                self._fresh.append(name)
            elif local.backlog is not None:
                self._waiting.append(name)
            if most == EVERYTHING and self._shares.held > self._shares.budget:
                self._make_room()
        return most - left

    def _share(self, active: _Active, shared: Shared, tokens: Sequence[int]) -> int:
        """Write output into the key's tree; the bytes it takes."""
        sequences = 0
        if active.written >= SEGMENT:
            self._close(active, shared)
            tokens = [*active.recent[-OVERLAP:], *tokens]
        if active.sequence < 0:
            active.sequence = shared.new_sequence()
            sequences = 1
        shared.tree.extend(active.sequence, tokens)
        active.written += len(tokens)
        return bytes_of(len(tokens), sequences)

    def _close(self, active: _Active, shared: Shared) -> None:
        """From now on the segment under way may give way."""
        if active.sequence >= 0:
            closed = shared, active.sequence, active.written
            self._outputs.setdefault(shared.owner, deque()).append(closed)
            active.sequence, active.written = -1, 0

    def _shared_of(self, key: str, owner: str) -> Shared:
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = Shared(key, owner, self._new_tree(self.depth))
            self._shares.grow(owner, TREE_BYTES)
        return shared

    def _make_room(self) -> None:
        """Let outputs give way, then trees of requests under way, until the rest fits."""
        while self._shares.held > self._shares.budget:
            if not self._shares.give_way(self._take):
                return  # nothing but what is written at this moment

    def _take(self, owner: str) -> bool:
        """Give up the owner's oldest output or, without any, its largest tree under way."""
        outputs = self._outputs.get(owner)
        if outputs:
            shared, sequence, tokens = outputs.popleft()
            self._graveyard.put(Dead(shared.tree, [(sequence, tokens)], tokens, whole=False))
            self._shares.grow(owner, -bytes_of(tokens))
            self.evicted += 1
            shared.sequences -= 1
            self._drop(shared)
            self._leave(owner)
            return True
        mine = [a for a in self._active.values() if a.owner == owner and a.local is not None]
        if not mine:
            return False
        self._bury(max(mine, key=lambda active: active.held))
        self.shed += 1
        return True

    def _bury(self, active: _Active) -> None:
        local = active.local
        assert local is not None, "buried twice"
        self._graveyard.put(local.dead())
        self._shares.grow(active.owner, -active.held)
        active.local, active.held = None, 0

    def _drop(self, shared: Shared) -> None:
        """Forget a tree that holds nothing and that nobody uses."""
        if not shared.users and not shared.sequences:
            del self._shared[shared.key]
            self._shares.grow(shared.owner, -TREE_BYTES)

    def _leave(self, owner: str) -> None:
        """Forget an owner that holds nothing."""
        if not self._outputs.get(owner):
            self._outputs.pop(owner, None)
            if not self._shares.of(owner):
                self._shares.forget(owner)
