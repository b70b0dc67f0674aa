"""Which requests, and which KV-cache blocks, have drafter prefill.

A request without drafter prefill gets no model drafts. It is skipped where the budget does not pay
for it (see ``prefill_budget``), or where it begins with shared blocks that lack drafter prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from decoder.core.guards.prefill_budget import SAMPLE

SEEDS: Final = 0.5
"""Share of requests that begin with shared blocks, from which on those without shared blocks are
always prefilled: others will share their blocks, for as long as these are cached."""
RECENT: Final = 1 / 8
"""Weight of the newest request in that share."""


class PrefillCoverage:
    """Coverage of the requests and blocks of one worker."""

    def __init__(self, drafter: Any) -> None:
        """Begin without requests. ``drafter`` is vLLM's, which gets its blocks later."""
        self.skipped: set[str] = set()
        """Requests without drafter prefill."""
        self.reuses_blocks = False
        """Whether a request of this step began with shared blocks."""
        self._drafter = drafter
        self._admitted: set[str] = set()
        self._covered: set[int] = set()  # blocks whose last writer has drafter prefill
        self._blocks: dict[str, list[int]] = {}  # of each request, in its order
        self._shared: dict[str, int] = {}  # number of shared blocks that a request begins with
        self._new: dict[str, int] = {}  # index of a request's first block not recorded yet
        self._sharing = 1.0  # share of new requests that begin with shared blocks
        self._skips = 0  # requests skipped since the last sampled one

    def schedule(self, output: Any) -> None:
        """Take in the blocks that a step's ``SchedulerOutput`` gives to requests. Call it for every
        step, before :meth:`admit`."""
        self.reuses_blocks = False
        group = max(getattr(self._drafter, "kv_cache_gid", 0), 0)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids[group], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._begin(name, blocks[group], computed)
                self.reuses_blocks = True
            elif blocks is not None:
                known = self._blocks.setdefault(name, [])
                self._new.setdefault(name, len(known))
                known += blocks[group]

    def _begin(self, name: str, blocks: Sequence[int], computed: int) -> None:
        self._blocks[name] = list(blocks)
        self._shared[name] = self._new[name] = computed // self._drafter.block_size
        self.reuses_blocks |= computed > 0

    def admit(self, names: Sequence[str], allowed: bool) -> None:
        """Decide which new requests of a step the drafter prefills: all if ``allowed``, else one in
        ``SAMPLE``; never one that begins with shared blocks without prefill."""
        fresh = dict.fromkeys(name for name in names if name not in self._admitted)
        # In the scheduler's order: one may share blocks of another in the same step.
        for name in [*(n for n in self._new if n in fresh), *(fresh.keys() - self._new.keys())]:
            shared = self._shared.get(name)
            covered = self._covered.issuperset(self._blocks.get(name, [])[:shared])
            if covered and not allowed and (shared != 0 or self._sharing < SEEDS):
                self._skips = (self._skips + 1) % SAMPLE
                covered = not self._skips
            self._admitted.add(name)
            if not covered:
                self.skipped.add(name)
            self._record(name)
            if shared is not None:
                self._sharing += ((shared > 0) - self._sharing) * RECENT
        for name in self._admitted.intersection(self._new):
            self._record(name)

    def _record(self, name: str) -> None:
        """Record whether a request's new blocks have drafter prefill."""
        if (begin := self._new.pop(name, None)) is not None:
            covered = self._covered
            change = covered.difference_update if name in self.skipped else covered.update
            change(self._blocks[name][begin:])

    def forget(self, name: str) -> None:
        """Forget a request that ended or lost its blocks. Unknown names are ignored."""
        self._admitted.discard(name)
        self.skipped.discard(name)
        blocks = self._blocks.pop(name, [])
        self._covered.difference_update(blocks[self._new.pop(name, len(blocks)) :])
        self._shared.pop(name, None)

    def skip_all(self) -> None:
        """Skip all running requests: the drafter missed some of their text."""
        for name in self._admitted - self.skipped:
            self._covered.difference_update(self._blocks.get(name, [])[self._shared.get(name, 0) :])
            self.skipped.add(name)
