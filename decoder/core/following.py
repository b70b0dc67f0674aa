"""The requests that a router follows: their text, what was committed of it, and their labels.

A request whose text is not the engine's is left out by itself, whatever happens to it, and so is
one whose bookkeeping fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Handle
from decoder.core import cycles, taking
from decoder.core.counters import Counters
from decoder.core.events import Sink
from decoder.core.payoff.memory import Memories
from decoder.core.payoff.model_arm import ModelArm
from decoder.core.requests import Outcomes, RequestOptions
from decoder.core.table import ENDED, INDEX, MEMORY, OPEN, STOPPED, RequestTable
from decoder.drafting.drafts import STOCK, Tokens
from decoder.drafting.pages import new_pool
from decoder.drafting.suffix import SuffixCache
from decoder.limited_log import LimitedLog


class Following:
    """Requests by name, from their start to their stop. For the engine's thread."""

    def __init__(
        self, cache: SuffixCache | None, sink: Sink, model_arm: ModelArm, model_len: int
    ) -> None:
        """Begin with nobody.

        Args:
            model_len: tokens of a model draft at most, 0 without a model drafter.
        """
        self.cache, self.model_arm = cache, model_arm
        self._sink, self._model_len = sink, model_len
        self._limited_log = LimitedLog()
        self.table = RequestTable(max(cache.most if cache is not None else 1, STOCK.most))
        self.counters = Counters(self.table.arrays.counts)
        self.memories = Memories(cache.memory_bytes if cache is not None else 0)
        self._text, self._paid = Handle(), Handle()

    def __contains__(self, request: str) -> bool:
        return request in self.table

    def start(
        self, request: str, prompt: Tokens, options: RequestOptions, output: Sequence[int] = ()
    ) -> None:
        """Begin to follow a request whose prompt is int32 [n].

        Args:
            output: tokens committed before, of a request that is met late.

        Raises:
            ValueError: the request is followed already.
        """
        if request in self.table:
            raise ValueError(f"request {request!r} is active already")
        text = np.concatenate([prompt, np.array(output, np.int32)], dtype=np.int32)
        payoff = self.model_arm.payoff(self._model_len) if self._model_len else 1.0
        slot = self.table.add(
            request, options, text, len(prompt), payoff, self._sink.names(request, options)
        )
        self.counters.started += 1
        row = self.table.arrays.requests[slot]
        row[MEMORY] = self.memories.begin(options.key)
        if self.cache is None:
            return
        # As one text: what a request wrote before it was met is not written for others again. One
        # that may have no draft has nothing to copy from it.
        left = min(options.max_tokens - len(output), options.max_model_len - len(text)) - 1
        kept = text if options.speculate and left > 0 else text[:0]
        try:
            row[INDEX] = self.cache.start(request, kept, options.key)
        except Exception:
            self.stop(request, "lost")
            raise

    def _take(
        self,
        outcomes: Outcomes,
        slots: NDArray[np.int64],
        step_tokens: int,
        step_us: float,
        compared: bool,
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Take in what a step committed: tokens [n] of each, and the sums of :func:`taking.take`,
        what text foretold among them where sides are ``compared``. Mutates ``slots``."""
        names, tokens, ends, verified, lengths = outcomes
        done, made = np.zeros((2, len(names)), np.int64)
        sums = np.zeros(taking.BEGAN + 1, np.int64)
        at, why = 0, -1
        while why != taking.DONE:
            table = self.table.arrays
            at, why = taking.take(
                *self._handles(), self.model_arm.odds, self.model_arm.seen,
                slots, tokens, ends, verified, lengths, step_tokens, step_us, at, compared, done,
                made, sums,
            )  # fmt: skip
            if why == taking.DONE:
                break
            place = at - (why == taking.OVER)
            name, slot = names[place], int(slots[place])
            if why == taking.OVER:
                if self.cache is not None:
                    self.cache.book(name)
                stopped = int(table.requests[slot, ENDED]) == STOPPED
                self.stop(name, "stop" if stopped else "length")
            elif why == taking.LOST:
                slots[place] = -1
                self._leave_out(name, "length")
            elif why == taking.GROW:
                done[place] |= taking.GROWN
                row = table.requests[slot]
                self.memories.grow(int(row[MEMORY]), int(row[OPEN]))
            else:
                done[place] |= taking.WRITTEN
                came = tokens[(ends[place - 1] if place else 0) : ends[place]]
                count, _ = taking.until_end(table, slot, came)
                try:
                    assert self.cache is not None
                    self.cache.extend(name, came[:count].tolist())
                except Exception:  # noqa: BLE001 - told by the limited_log
                    slots[place] = -1
                    self._fault(name)
        if sums[taking.BEGAN] and self.cache is not None:
            for place in np.flatnonzero(done & taking.BEGUN).tolist():
                self.cache.book(names[place])
        return made, sums[: taking.BEGAN].tolist()

    def _handles(self) -> tuple[Any, Any, Any]:
        """Of the requests, the text and the memories."""
        pool = self.cache.pool if self.cache is not None else NO_TEXT
        return self.table.handle, self._text.of(pool), self._paid.of(self.memories.payoffs)

    def _fault(self, name: str) -> None:
        """Count and log the exception being handled, of the bookkeeping of a request."""
        if name in self.table:
            self._limited_log.exception("a request is left out of drafting: its bookkeeping failed")
            self._leave_out(name, "fault")

    def _leave_out(self, name: str, reason: str) -> None:
        """Follow a request no longer: what is known of it cannot be relied on."""
        self.counters.left_out[reason] += 1
        self.stop(name, "lost")

    def stop(self, name: str, reason: str) -> None:
        """Stop following a request: its open labels leave censored.

        Unknown names are ignored; never raises.
        """
        if name not in self.table:
            return
        slot = self.table.remove(name)
        self.counters.stopped += 1
        try:
            cycles.close(self.table.arrays, slot, self._sink.word(reason))
            if self.cache is not None:
                self.cache.stop(name)
            self.memories.end(int(self.table.arrays.requests[slot, MEMORY]))
        except Exception:  # noqa: BLE001 - told by the limited_log
            self._limited_log.exception("a request's last labels are lost: its bookkeeping failed")
            self.counters.left_out["fault"] += 1


NO_TEXT: Final = new_pool(1, 1, 1)
