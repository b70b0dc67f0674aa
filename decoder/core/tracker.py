"""The requests that a router follows: their text, what was committed of it, and their labels.

A request whose text is not the engine's is left out by itself, whatever happens to it, and so is
one whose bookkeeping fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Handles
from decoder.contracts.fields import STEP
from decoder.core import cycles, observe
from decoder.core.counters import Counters
from decoder.core.events import Sink
from decoder.core.payoff.memory import Memories
from decoder.core.payoff.model_arm import ModelArm
from decoder.core.requests import RequestOptions, StepReport
from decoder.core.table import STOPPED, RequestTable, State
from decoder.drafting.drafts import STOCK, Tokens
from decoder.drafting.pages import new_pool
from decoder.drafting.suffix import SuffixCache
from decoder.limited_log import LimitedLog


class Progress(NamedTuple):
    """What a step came to."""

    closed: int  # cycles
    committed: int  # tokens in them
    verified: int  # draft tokens in them
    predicted: int  # tokens of all that their own text predicted, where these are counted
    drafts: int  # draft tokens verified of all
    tokens: int  # committed of all


class Tracker:
    """Requests by name, from their start to their stop. For the engine's thread."""

    def __init__(
        self,
        cache: SuffixCache | None,
        sink: Sink,
        model_arm: ModelArm,
        model_len: int,
        classes: NDArray[np.float32],
    ) -> None:
        """Begin with nobody.

        Args:
            model_len: tokens of a model draft at most, 0 without a model drafter.
            classes: of the vocabulary's tokens, float32 [vocabulary, classes].
        """
        self.table = RequestTable(max(cache.limits.most if cache is not None else 1, STOCK.most))
        self.counters = Counters(self.table.arrays.counts)
        self.memories = Memories(cache.memory_bytes if cache is not None else 0)
        self.event = np.zeros(STEP.itemsize, np.uint8)
        """Bytes of what the events of a step share."""
        self.limited_log = LimitedLog()
        self.sink, self._cache = sink, cache
        self._model_arm, self._model_len, self._classes = model_arm, model_len, classes
        self._handles = Handles[State]()
        self._handle: Any = None
        self._parts: tuple[Any, ...] = (None,)

    def state(self) -> Any:
        """The handle of all arrays, as :mod:`decoder.core.table` has them."""
        pool = self._cache.pool if self._cache is not None else NO_TEXT
        table = self.table
        parts = table.arrays, table.offers, pool, self.memories.payoffs
        if not all(map(is_, parts, self._parts)):
            self._parts, arm = parts, self._model_arm
            self._handle = self._handles.of(
                State(
                    table.arrays, pool, self.memories.payoffs, table.offers, table.look_ups,
                    arm.odds, arm.seen, self._classes, self.event,
                )
            )  # fmt: skip
        return self._handle

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
        payoff = self._model_arm.payoff(self._model_len) if self._model_len else 1.0
        slot = self.table.add(
            request, options, text, len(prompt), payoff, self.sink.names(request, options)
        )
        self.counters.started += 1
        row = self.table.arrays.requests[slot]
        row["memory"] = self.memories.begin(options.key)
        if self._cache is None:
            return
        # As one text: what a request wrote before it was met is not written for others again. One
        # that may have no draft has nothing to copy from it.
        left = min(options.max_tokens - len(output), options.max_model_len - len(text)) - 1
        kept = text if options.speculate and left > 0 else text[:0]
        try:
            row["index"] = self._cache.start(request, kept, options.key)
        except Exception:
            self.stop(request, "lost")
            raise

    def advance(self, report: StepReport, step_us: float, compared: bool) -> Progress:
        """Take in what a step committed; labels resolve. Mutates ``report``, whose requests that
        ended or are left out have no slot any more.

        Args:
            compared: whether to count the tokens that text predicted.
        """
        advanced, step = report.advanced, np.zeros(1, observe.OBSERVED)
        before = self.counters.tokens
        step["step_tokens"], step["step_us"] = report.step_tokens, step_us
        step["compared"] = compared
        at, why = 0, -1
        while True:
            at, why = observe.observe(self.state(), advanced, report.tokens, step, at)
            if why == observe.DONE:
                break
            place = at - (why == observe.OVER)
            if self._is_over(why, place, report):
                advanced["slot"][place] = -1
        _, _, _, closed, committed, verified, predicted, began, drafts = step[0].item()
        if began and self._cache is not None:
            for place in np.flatnonzero(advanced["done"] & observe.BEGUN).tolist():
                self._cache.book(report.names[place])
        made = self.counters.tokens - before
        return Progress(closed, committed, verified, predicted, drafts, made)

    def _is_over(self, why: int, place: int, report: StepReport) -> bool:
        """Do what a request needs of Python; whether it is followed no more."""
        name, request = report.names[place], report.advanced[place]
        row = self.table.arrays.requests[request["slot"]]
        if why == observe.OVER:
            if self._cache is not None:
                self._cache.book(name)
            self.stop(name, "stop" if row["ended"] == STOPPED else "length")
            return True
        if why == observe.LOST:
            self._leave_out(name, "length")
        elif why == observe.GROW:
            request["done"] |= observe.GROWN
            self.memories.grow(int(row["memory"]), int(row["num_open"]))
            return False
        else:
            request["done"] |= observe.WRITTEN
            begin = report.advanced["end"][place - 1] if place else 0
            came = report.tokens[begin : request["end"]]
            count = observe.visible(self.state(), int(request["slot"]), came)
            try:
                assert self._cache is not None
                self._cache.extend(name, came[:count].tolist())
                return False
            except Exception:  # noqa: BLE001 - logged
                self._fault(name)
        return True

    def _fault(self, name: str) -> None:
        """Count and log the exception being handled, of the bookkeeping of a request."""
        if name in self.table:
            self.limited_log.exception("a request is left out of drafting: its bookkeeping failed")
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
            cycles.close_request(self.state(), slot, self.sink.word(reason))
            if self._cache is not None:
                self._cache.stop(name)
            self.memories.end(int(self.table.arrays.requests["memory"][slot]))
        except Exception:  # noqa: BLE001 - logged
            self.limited_log.exception("a request's last labels are lost: its bookkeeping failed")
            self.counters.left_out["fault"] += 1


NO_TEXT: Final = new_pool(1, 1, 1)
