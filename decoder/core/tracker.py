"""Tracker of a router's requests: their text, committed tokens and open labels.

A request whose length differs from the engine's is dropped on its own; so is one whose bookkeeping
fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import handle_of
from decoder.contracts.fields import STEP
from decoder.core import cycles, observe
from decoder.core.counters import Counters
from decoder.core.events import Sink
from decoder.core.payoff.memory import PRIOR_FIRST, PRIOR_LOG, Memories
from decoder.core.payoff.model_arm import ModelArm
from decoder.core.requests import RequestOptions, StepReport
from decoder.core.table import (
    MAX_REQUESTS,
    MAX_STOPS,
    REQUEST,
    STOPPED,
    State,
    new_offers,
    new_table,
)
from decoder.drafting.matches import BACK, STOCK, Tokens, scratch_for, written_for
from decoder.drafting.suffix import SuffixCache
from decoder.drafting.windows import new_pool
from decoder.experiment.block import Groups
from decoder.limited_log import LimitedLog


class Progress(NamedTuple):
    """Totals of a step."""

    tokens: int  # tokens committed by all requests
    closed: int  # cycles closed
    committed: int  # tokens in closed cycles
    verified: int  # draft tokens in closed cycles
    predicted: int  # tokens predicted by their request's own text, in a round
    drafts: int  # draft tokens verified by all requests
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

        ``model_len`` is the maximum length of a model draft, 0 without a model drafter; ``classes``
        are token classes, float32 [vocabulary, classes].
        """
        longest = max(cache.limits.most if cache is not None else 1, STOCK.most)
        self.memories = Memories(cache.memory_bytes if cache is not None else 0)
        self.state = State(
            new_table(longest), cache.pool if cache is not None else new_pool(1, 1),
            self.memories.payoffs, new_offers(longest), written_for(longest), written_for(longest),
            scratch_for(longest), model_arm.odds, model_arm.seen, classes,
            np.zeros(STEP.itemsize, np.uint8),
        )  # fmt: skip
        self.handle = handle_of(self.state)
        self.table = self.state.table
        self.counters = Counters(self.table.counts)
        self.limited_log = LimitedLog()
        self.sink, self._cache = sink, cache
        self._model_arm, self._model_len = model_arm, model_len
        self.slots: dict[str, int] = {}
        self.options: dict[int, RequestOptions] = {}  # by slot
        self._free = list(range(MAX_REQUESTS - 1, -1, -1))
        self._stopped: list[int] = []  # slots of stopped requests with completed cycles

    def start(
        self, request: str, prompt: Tokens, options: RequestOptions, output: Sequence[int] = ()
    ) -> None:
        """Begin to track a request with int32 ``prompt`` [n] and ``output`` committed before.

        Raises:
            ValueError: the request is tracked already, has too many stop token ids, or is one of
                too many.
        """
        if request in self.slots:
            raise ValueError(f"request {request!r} is active already")
        if len(options.stop_ids) > MAX_STOPS or not self._free:
            raise ValueError(
                f"no drafts for a request with {len(options.stop_ids)} stop token ids beside "
                f"{len(self.slots)} others: at most {MAX_STOPS} and {MAX_REQUESTS}"
            )
        text = np.concatenate([prompt, np.array(output, np.int32)], dtype=np.int32)
        slot = self._free[-1]
        self._fill(slot, text, len(prompt), options)
        self._free.pop()
        self.slots[request], self.options[slot] = slot, options
        packed = self.sink.names(request, options)
        self.table.names[slot] = np.frombuffer(packed, np.uint8) if packed is not None else 255
        self.counters.started += 1
        row = self.table.requests[slot]
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

    def _fill(self, slot: int, text: Tokens, prompt_len: int, options: RequestOptions) -> None:
        """Fill the row of a new request with ``text`` (int32 [n])."""
        table, last = self.table, text[-BACK:]
        stops = np.array(sorted(options.stop_ids), np.int32)
        table.requests[slot] = np.zeros((), REQUEST)
        row = table.requests[slot]
        row["length"], row["prompt_len"], row["cycle"] = len(text), prompt_len, -1
        row["max_tokens"], row["max_length"] = options.max_tokens, options.max_model_len
        row["min_tokens"], row["speculates"] = options.min_tokens, options.speculate
        row["first"], row["log_fast"], row["log_slow"] = PRIOR_FIRST, PRIOR_LOG, PRIOR_LOG
        arm, k = self._model_arm, self._model_len
        row["model_recent"], row["num_stops"] = arm.payoff(k) if k else 1.0, len(stops)
        row["context"][BACK - len(last) :] = last
        table.stops[slot, : len(stops)] = stops

    def advance(self, report: StepReport, step_us: float, in_round: bool) -> Progress:
        """Process the committed tokens of a step, ``in_round`` if variants are compared in it;
        labels resolve. Mutates ``report``: ended and dropped requests get slot -1."""
        advanced, step = report.advanced, np.zeros(1, observe.OBSERVED)
        before = self.counters.tokens
        step["step_tokens"], step["step_us"] = report.step_tokens, step_us
        step["compared"] = in_round
        slots = advanced["slot"].copy() if in_round else advanced["slot"]
        at, status = 0, -1
        while True:
            at, status = observe.observe(self.handle, advanced, report.tokens, step, at)
            if status == observe.DONE:
                break
            position = at - (status == observe.OVER)
            if self._handle_early_return(status, position, report):
                advanced["slot"][position] = -1
        progress = Progress(self.counters.tokens - before, *step[0].item()[3:])
        if not in_round:
            return progress
        groups, sessions = dict[tuple[str, str], list[int]](), set[str]()
        per_request = zip(report.names, slots.tolist(), advanced["committed"].tolist(), strict=True)
        for name, slot, count in per_request:
            if slot >= 0:  # the options of ended requests are kept until their cycles are written
                options = self.options[slot]
                sums = groups.setdefault((options.tenant, options.workload), [0, 0])
                sums[0] += count
                sums[1] += 1
                sessions.add(options.session or name)
        return progress._replace(groups=groups, sessions=frozenset(sessions))

    def _handle_early_return(self, status: int, position: int, report: StepReport) -> bool:
        """Do the Python part for a request; whether it is no longer tracked."""
        name, request = report.names[position], report.advanced[position]
        if status == observe.OVER:
            ended = self.table.requests["ended"][request["slot"]]
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
        if name in self.slots:
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
        if name not in self.slots:
            return
        slot = self.slots.pop(name)
        self._stopped.append(slot)
        self.counters.stopped += 1
        try:
            cycles.close_request(self.handle, slot, self.sink.word(reason))
            if self._cache is not None:
                self._cache.stop(name)
            self.memories.end(int(self.table.requests["memory"][slot]))
        except Exception:  # noqa: BLE001 - logged
            self.limited_log.exception("a request's last labels are lost: its bookkeeping failed")
            self.counters.left_out["fault"] += 1

    def release_slots(self) -> None:
        """Free the slots of stopped requests: all their cycles are written."""
        for slot in self._stopped:
            del self.options[slot]
        self._free += self._stopped
        self._stopped.clear()
