"""Adapter between one vLLM model runner and the router; it reports what really ran.

The calls of a step:

==================  ==============================================================================
``before_step``     stop the requests that ended
``during_step``     bookkeeping of the router that the next choice does not need, beside the target
``decide``          observe the committed tokens, choose the next drafts
``drafted``         report the drafts that were made
==================  ==============================================================================

Nothing here raises into vLLM: a fault costs a step its drafts, is counted, and is logged at most
once a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from decoder.core.guards.draft_budget import DRAFTS_SHARE, room, under_grammar
from decoder.core.requests import Decisions, StepReport
from decoder.engines.vllm.batch_step import BatchStep
from decoder.engines.vllm.ranks import Plan, Ranks
from decoder.engines.vllm.request_options import options_of
from decoder.limited_log import LimitedLog
from decoder.policy.pricing import NOMINAL
from decoder.policy.rule import MODEL
from decoder.tenancy.identities import Identities

if TYPE_CHECKING:
    from decoder.worker import Worker

RESTARTS: Final = 2
"""How often a request that left the router is started again: its fault may be permanent."""
NO_CHOICE: Final = "choosing drafts failed: this step goes on without drafts"


class Adapter:
    """Hybrid decoding of one model runner, with all its state."""

    def __init__(
        self,
        worker: Worker | None,
        longest: int,
        *,
        has_model: bool = False,
        ranks: Ranks | None = None,
        deferred: Any = None,
    ) -> None:
        """``worker`` is None on a rank that follows another's decisions; ``longest`` the longest
        draft that the engine was started for, in tokens; ``deferred`` the ``DeferredDrafter`` of a
        V1 runner, None where nothing is deferred."""
        self.worker, self.has_model = worker, has_model
        self.ranks, self.deferred = ranks or Ranks(), deferred
        self.disabled = ""
        """Why drafting is disabled; "" while it is not."""
        self.ended: Collection[str] | None = None
        """Requests that ended with the step; None where the step could not be observed."""
        self._longest, self._limited_log = longest, LimitedLog()
        self._identities = Identities.load(worker.settings) if worker is not None else None
        self._restarts: Counter[str] = Counter()
        self._under_grammar: set[str] = set()
        self._chosen: tuple[StepReport, list[int]] | None = None
        self._steps = 0
        self._closed = False

    def before_step(self, ended: Collection[str]) -> None:
        """Stop the requests that ended."""
        for name in ended:
            # The router has seen ends by limit or stop token; other requests ended by a stop string
            # or by the client.
            with self.own("a request could not be stopped"):
                if self.worker is not None:
                    self.worker.router.stop(name, "abort")
            self._restarts.pop(name, None)
            self._under_grammar.discard(name)

    def during_step(self, exposed: bool) -> None:
        """Do the bookkeeping that the next choice does not need; on a GPU the target runs now.
        ``exposed``: whether the engine waits for it."""
        if self.worker is not None:
            with self.suppressing("bookkeeping failed"):
                self.worker.router.flush(exposed)

    def decide(self, size: int, step: Callable[[], BatchStep]) -> Plan:
        """Observe the committed tokens of a step, and choose the next drafts of a batch of
        ``size`` requests, in its order. ``step`` reports the step, on the leading rank. Call
        :meth:`drafted` with the result."""
        self.ended = self._chosen = None
        if self.disabled:
            return Plan.nothing(size)
        with self.own(NO_CHOICE):
            return self.ranks.agree(
                size, lambda: self._decided(step()), lambda: self._count(NO_CHOICE)
            )
        return Plan.nothing(size)

    def drafted(self, lengths: Sequence[int], k: int) -> None:
        """Record the drafts that were made: their lengths, by row of the batch, and the number of
        tokens that the model drafter made."""
        if self.worker is None or self.disabled or self._chosen is None:
            return
        with self.own("the drafts of a step could not be recorded"):
            report, rows = self._chosen
            if len(rows) < len(lengths):
                lengths = [lengths[row] for row in rows]
            self.worker.router.drafted(report, lengths, k)

    def failed(self) -> None:
        """Count the exception being handled, of the model drafter, which made no drafts.

        With several ranks it ends the process, since the others may have gone on. Where prefill is
        deferred, running requests get no more model drafts: the drafter's cache misses their text.
        """
        if self.ranks.size > 1:
            self.ranks.end("its model drafter failed, and others may go on.")
        self._count("the model drafter failed: this step goes on without its drafts")
        if self.deferred is not None:
            self.deferred.clear(missed=True)

    def disable(self, why: str) -> None:
        """Disable drafting and telemetry; requests go on as in plain vLLM."""
        if self.disabled:
            return
        self.disabled = why
        self._limited_log.warning("drafting is disabled: %s", why)
        self.close()  # policies, telemetry and scope belong to the former weights
        if self.deferred is not None:
            self.deferred.clear()

    def close(self) -> None:
        """Close the worker, which sends its last events."""
        if self.worker is not None and not self._closed:
            with self.suppressing("the worker could not be closed"):
                self.worker.close()
                self._closed = True

    def _decided(self, step: BatchStep) -> Plan:
        assert self.worker is not None, "only the leading rank decides"
        size, rows = len(step.names), [row for row, tokens in enumerate(step.sampled) if tokens]
        self._start_new(step)
        report = self._observed(step, rows)
        if report is None:
            return Plan.nothing(size)
        with self.suppressing(NO_CHOICE):
            self._set_budget(report, step)
            chosen = self.worker.router.choose(report)
            self._chosen = report, rows
            longest = self._longest_of(step, rows)
            drafts = _cache_drafts(chosen, longest, step.limits.vocabulary)
            end = step.limits.drafter_len if self.has_model else 0
            reach = [end - step.lengths[row] for row in rows]
            limits = _model_limits(chosen, longest, reach)
            k = min(max(limits, default=0), self.worker.settings.model_draft_tokens)
            return Plan(drafts, limits, k).spread(rows, size)
        return Plan.nothing(size)

    def _start_new(self, step: BatchStep) -> None:
        """Start the requests that the router does not track, with their text so far."""
        assert self.worker is not None and self._identities is not None
        router = self.worker.router
        known = router.requests.slots
        for row in [row for row, name in enumerate(step.names) if name not in known]:
            name = step.names[row]
            if self._restarts[name] >= RESTARTS:
                continue
            with self.suppressing("a request could not be started"):
                prompt, output, parameters = step.request_of(row)
                if getattr(parameters, "structured_outputs", None) is not None:
                    self._under_grammar.add(name)
                if prompt is not None:
                    self._restarts[name] += bool(output)
                    longest = step.limits.max_model_len
                    options = options_of(name, parameters, longest, self._identities)
                    router.start(name, prompt, options, output)

    def _observed(self, step: BatchStep, rows: Sequence[int]) -> StepReport | None:
        """Have the router observe the step, which advanced ``rows``; None where that failed before
        there was a report."""
        assert self.worker is not None, "only the leading rank decides"
        router, report = self.worker.router, None
        names, sampled, verified, lengths = step.names, step.sampled, step.verified, step.lengths
        if len(rows) < len(names):
            names, sampled = [names[row] for row in rows], [sampled[row] for row in rows]
            verified, lengths = [verified[row] for row in rows], [lengths[row] for row in rows]
        with self.suppressing("observing failed"):
            report = router.report(names, sampled, verified, lengths, step.step_tokens)
            report.timed, stopped = step.usual, router.counters.stopped
            before = report.advanced["slot"].copy()
            router.observe(report)
            self.ended = ()
            if router.counters.stopped > stopped:
                over = np.flatnonzero((before >= 0) & (report.advanced["slot"] < 0))
                self.ended = [names[index] for index in over.tolist()]
        return report

    def _set_budget(self, report: StepReport, step: BatchStep) -> None:
        """Fill in the budget of the next step. Mutates ``report``."""
        limits, most = step.limits, step.limits.step_tokens
        full = step.step_tokens >= most
        report.budget = room(len(step.names), limits.vocabulary, most, step.waiting, full=full)
        if not limits.chunked:
            self._steps += 1  # a prompt that is prefilled whole may need the whole budget
            report.budget *= self._steps % DRAFTS_SHARE > 0
        report.unable, report.waiting, report.capacity = step.unable, step.waiting, most

    def _longest_of(self, step: BatchStep, rows: Sequence[int]) -> list[int]:
        """Longest draft of each request in ``rows``."""
        assert self.worker is not None, "only the leading rank decides"
        longest, table = min(self._longest, step.longest), self.worker.router.costs.table
        if table is NOMINAL or not self._under_grammar:  # the nominal table has no unit of time
            return [longest] * len(rows)
        bound = [name in self._under_grammar for name in step.names]
        few = min(longest, under_grammar(sum(bound), table.time(len(bound))))
        return [few if bound[row] else longest for row in rows]

    def _count(self, what: str) -> None:
        """Count and log the exception being handled."""
        if self.worker is not None:
            self.worker.faults += 1
        self._limited_log.exception(what)

    @contextmanager
    def suppressing(self, what: str) -> Iterator[None]:
        """Suppress an exception: it is counted, and logged under ``what``."""
        try:
            yield
        except Exception:  # noqa: BLE001 - logged
            self._count(what)

    @contextmanager
    def own(self, what: str) -> Iterator[None]:
        """Likewise, and attribute the time to this plugin: the rest is that of vLLM."""
        timer = self.worker.router.timer if self.worker is not None else None
        if timer is not None:
            timer.enter()
        try:
            yield
        except Exception:  # noqa: BLE001 - logged
            self._count(what)
        if timer is not None:
            timer.leave()


def _cache_drafts(chosen: Decisions, longest: list[int], vocabulary: int) -> list[list[int]]:
    """The cache draft of each request, of at most ``longest`` tokens.

    It ends before the first token outside of the target's vocabulary, such as a placeholder in a
    prompt.
    """
    lengths = [*map(min, chosen.lengths.tolist(), longest)]
    if not (width := max(lengths, default=0)):
        return [[] for _ in lengths]
    rows, tokens = chosen.drafts.tolist(), chosen.tokens[:, :width]
    ids = tokens.view(np.uint32)  # large below 0
    if ids.max() >= vocabulary:
        valid = (ids < vocabulary).cumprod(1).sum(1).tolist()
        lengths = [min(length, valid[row]) for row, length in zip(rows, lengths, strict=True)]
    # Each draft by itself: operations on all rows are slower where caches are cold.
    return [
        tokens[row, :length].tolist() if length else []
        for row, length in zip(rows, lengths, strict=True)
    ]


def _model_limits(chosen: Decisions, longest: list[int], reach: list[int]) -> list[int]:
    """Most tokens of each request's model draft; ``reach`` is the drafter's room for each."""
    arms, rooms = chosen.arms.tolist(), chosen.rooms.tolist()
    return [
        max(min(room, left, most), 0) if arm == MODEL else 0
        for arm, room, left, most in zip(arms, rooms, reach, longest, strict=True)
    ]
