"""Tracker of a router's requests: their text, committed tokens and open labels.

A request whose length differs from the engine's is dropped on its own; so is one whose bookkeeping
fails.
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
from decoder.drafting.suffix import SuffixCache
from decoder.drafting.windows import new_pool
from decoder.experiment.block import Groups
from decoder.limited_log import LimitedLog


class Progress(NamedTuple):
    """Totals of a step."""

    closed: int  # cycles closed
    committed: int  # tokens in closed cycles
    verified: int  # draft tokens in closed cycles
    predicted: int  # tokens predicted by their request's own text, in a round
    drafts: int  # draft tokens verified by all requests
    tokens: int  # tokens committed by all requests
    groups: Groups = {}  # noqa: RUF012 - tokens and requests by tenant and workload, in a round
    sessions: frozenset[str] = frozenset()  # in a round


class Tracker:
    """Tracks requests by name from start to stop. For the engine's thread."""

    def __init__(
        self,
        cache: SuffixCache | None,
        sink: Sink,
        model_arm: ModelArm,
        model_len: int,
        classes: NDArray[np.float32],
    ) -> None:
        """Begin without requests.

        Args:
            model_len: maximum length of a model draft, 0 without a model drafter.
            classes: token classes, float32 [vocabulary, classes].
        """
        self.table = RequestTable(max(cache.limits.most if cache is not None else 1, STOCK.most))
        self.counters = Counters(self.table.arrays.counts)
        self.memories = Memories(cache.memory_bytes if cache is not None else 0)
        self.event = np.zeros(STEP.itemsize, np.uint8)
        """Packed ``STEP`` fields, shared by the events of a step."""
        self.limited_log = LimitedLog()
        self.sink, self._cache = sink, cache
        self._model_arm, self._model_len, self._classes = model_arm, model_len, classes
        self._handles = Handles[State]()
        self._handle: Any = None
        self._parts: tuple[Any, ...] = (None,)

    def state(self) -> Any:
        """Handle of the current :class:`~decoder.core.table.State`."""
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
        """Begin to track a request whose prompt is int32 [n].

        Args:
            output: tokens committed before tracking began.

        Raises:
            ValueError: the request is tracked already.
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
        # Index prompt and earlier output as one text: that output is not shared again. A request
        # that cannot have a draft needs no text.
        left = min(options.max_tokens - len(output), options.max_model_len - len(text)) - 1
        kept = text if options.speculate and left > 0 else text[:0]
        try:
            row["index"] = self._cache.start(request, kept, options.key)
        except Exception:
            self.stop(request, "lost")
            raise

    def advance(self, report: StepReport, step_us: float, in_round: bool) -> Progress:
        """Process the committed tokens of a step; labels resolve. Mutates ``report``: ended and
        dropped requests get slot -1.

        Args:
            in_round: whether variants are compared in the step.
        """
        advanced, step = report.advanced, np.zeros(1, observe.OBSERVED)
        before = self.counters.tokens
        step["step_tokens"], step["step_us"] = report.step_tokens, step_us
        step["compared"] = in_round
        slots = advanced["slot"].copy() if in_round else advanced["slot"]
        at, status = 0, -1
        while True:
            at, status = observe.observe(self.state(), advanced, report.tokens, step, at)
            if status == observe.DONE:
                break
            position = at - (status == observe.OVER)
            if self._handle_early_return(status, position, report):
                advanced["slot"][position] = -1
        _, _, _, closed, committed, verified, predicted, drafts = step[0].item()
        tokens = self.counters.tokens - before
        progress = Progress(closed, committed, verified, predicted, drafts, tokens)
        if not in_round:
            return progress
        groups, sessions = self.table.shared(report.names, slots, advanced["committed"])
        return progress._replace(groups=groups, sessions=sessions)

    def _handle_early_return(self, status: int, position: int, report: StepReport) -> bool:
        """Do the Python part for a request; whether it is no longer tracked."""
        name, request = report.names[position], report.advanced[position]
        if status == observe.OVER:
            ended = self.table.arrays.requests["ended"][request["slot"]]
            self.stop(name, "stop" if ended == STOPPED else "length")
        elif status == observe.LOST:
            self._drop(name, "length")
        else:
            begin = report.advanced["end"][position - 1] if position else 0
            try:
                assert self._cache is not None
                self._cache.grow(name, int(request["end"] - begin))
                return False
            except Exception:  # noqa: BLE001 - logged
                self._fault(name)
        return True

    def _fault(self, name: str) -> None:
        """Log the exception being handled, and drop the request."""
        if name in self.table:
            self.limited_log.exception("a request gets no more drafts: its bookkeeping failed")
            self._drop(name, "fault")

    def _drop(self, name: str, reason: str) -> None:
        """Drop a request whose state is unreliable, and count it by ``reason``."""
        self.counters.left_out[reason] += 1
        self.stop(name, "lost")

    def stop(self, name: str, reason: str) -> None:
        """Stop tracking a request: its open labels are censored.

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


NO_TEXT: Final = new_pool(1, 1)
