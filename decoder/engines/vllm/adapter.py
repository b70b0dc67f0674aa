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
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from decoder.core.guards.draft_budget import DRAFTS_SHARE, room, under_grammar
from decoder.core.requests import Decisions, StepReport
from decoder.engines.vllm.batch_step import BatchStep
from decoder.engines.vllm.plan import Plan
from decoder.engines.vllm.profile import IDLE_SECONDS, WorkerProfile
from decoder.engines.vllm.ranks import Ranks
from decoder.engines.vllm.request_options import options_of, text_of
from decoder.limited_log import LimitedLog
from decoder.policy.pricing import NOMINAL
from decoder.policy.rule import MODEL
from decoder.tenancy.identities import Identities

if TYPE_CHECKING:
    from decoder.worker import Worker

RESTARTS: Final = 2
"""How often a request that left the router is started again: its fault may be permanent."""


class Adapter:
    """Hybrid decoding of one model runner, with all its state."""

    def __init__(
        self,
        worker: Worker | None,
        longest: int,
        *,
        has_model: bool = False,
        limited_log: LimitedLog | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Put an adapter together.

        Args:
            worker: None on a rank that follows another's decisions.
            longest: longest draft that the engine was started for, in tokens.
        """
        self.worker = worker
        self.ranks = ranks or Ranks()
        self.limited_log = limited_log or LimitedLog()
        self.idle = ""
        """Why drafting is disabled; "" while it is not."""
        self.unread: Collection[str] = ()
        """Requests of the step for which the model drafter has no prefill, and makes no drafts."""
        self.usual = True
        """Whether the step did no deferred work; only then its time informs the cost model."""
        self.ended: Collection[str] | None = None
        """Requests that ended with the step; None where the step could not be observed."""
        self.has_model = has_model
        self.profile: WorkerProfile | None = None
        self._longest = longest
        self._identities = Identities.load(worker.settings) if worker is not None else None
        self._restarts: Counter[str] = Counter()
        self._chosen: tuple[StepReport, list[int]] | None = None
        self._steps = 0
        self._closed = False

    def before_step(self, ended: Collection[str]) -> None:
        """Stop the requests that ended."""
        self.time(ours=True)
        for name in ended:
            # The router has seen ends by limit or stop token; other requests ended by a stop string
            # or by the client.
            if self.worker is not None:
                with self.sparing("a request could not be stopped"):
                    self.worker.router.stop(name, "abort")
            self._restarts.pop(name, None)
        self.time(ours=False)

    def during_step(self, exposed: bool) -> None:
        """Do the bookkeeping that the next choice does not need; on a GPU the target runs now.

        Args:
            exposed: whether the engine waits for it.
        """
        if self.worker is None:
            return
        with self.sparing("bookkeeping failed"):
            self.worker.router.settle(exposed)

    def after_step(self, idle: bool) -> None:
        """Continue a doubtful profile while the engine is idle: vLLM runs an empty step after the
        last request."""
        profile = self.profile
        if not idle or profile is None or not profile.doubted or self.idle:
            return
        with self.sparing("steps cannot be profiled: costs are learned from service alone"):
            costs = profile.take(IDLE_SECONDS)
            if costs is not None and self.worker is not None:
                self.worker.router.costs = costs

    def decide(self, size: int, step: Callable[[], BatchStep]) -> Plan:
        """Observe the committed tokens of a step, and choose the next drafts of the batch, in its
        order. Call :meth:`drafted` with the result.

        Args:
            size: requests of the batch.
            step: reports the step; called on the leading rank.
        """
        self.ended = self._chosen = None
        if self.idle:
            return Plan.nothing(size)
        self.time(ours=True)
        plan = self.ranks.agree(
            size,
            lambda: self._decided(step()),
            lambda: self._count("choosing drafts failed: this step goes on without drafts"),
        )
        self.time(ours=False)
        return plan

    def drafted(self, lengths: Sequence[int], k: int) -> None:
        """Record the drafts that were made: their lengths, by row of the batch, and the number of
        tokens that the model drafter made."""
        self.time(ours=True)
        if self.worker is not None and not self.idle:
            with self.sparing("the drafts of a step could not be recorded"):
                if self._chosen is not None:
                    report, rows = self._chosen
                    if len(rows) < len(lengths):
                        lengths = [lengths[row] for row in rows]
                    self.worker.router.drafted(report, lengths, k)
        self.time(ours=False)

    def failed(self) -> None:
        """Count the exception being handled, of the model drafter, which made no drafts. With
        several ranks it ends the process, since the others may have gone on."""
        if self.ranks.size > 1:
            self.ranks.end("its model drafter failed, and others may go on.")
        self._count("the model drafter failed: this step goes on without its drafts")

    def rest(self, why: str) -> None:
        """Disable drafting and telemetry; requests go on as in plain vLLM."""
        if self.idle:
            return
        self.idle = why
        self.limited_log.warning("drafting is disabled: %s", why)
        self.close()  # policies, telemetry and scope belong to the former weights

    def close(self) -> None:
        """Close the worker, which sends its last events."""
        if self.worker is not None and not self._closed:
            with self.sparing("the worker could not be closed"):
                self.worker.close()
                self._closed = True

    def _decided(self, step: BatchStep) -> Plan:
        assert self.worker is not None, "only the leading rank decides"
        slots, size = self.worker.router.table.slots, len(step.names)
        for row in [row for row, name in enumerate(step.names) if name not in slots]:
            if self._restarts.get(step.names[row], 0) < RESTARTS:
                with self.sparing("a request could not be started"):
                    self._start(row, step)
        rows = [row for row, tokens in enumerate(step.sampled) if tokens]
        report = self._observed(step, rows)
        if report is None:
            return Plan.nothing(size)
        chosen: Decisions | None = None
        with self.sparing("choosing drafts failed: this step goes on without drafts"):
            self._set_budget(report, step, rows)
            chosen = self.worker.router.choose(report)
        if chosen is None:
            return Plan.nothing(size)
        self._chosen = report, rows
        end = step.limits.drafter_len if self.has_model else 0
        most = self._longest_of(step, rows)
        given, rooms = _given(chosen, most, end - report.advanced["length"], step.limits.vocabulary)
        k = min(int(rooms.max(initial=0)), self.worker.settings.model_draft_tokens)
        return Plan.of(size, rows, given, rooms.tolist(), k)

    def _observed(self, step: BatchStep, rows: Sequence[int]) -> StepReport | None:
        """Have the router observe the step, which advanced ``rows``; None where that failed before
        there was a report."""
        assert self.worker is not None, "only the leading rank decides"
        router, report = self.worker.router, None
        names, sampled, states = step.names, step.sampled, step.states
        if len(rows) < len(names):
            names, sampled = [names[row] for row in rows], [sampled[row] for row in rows]
            states = [states[row] for row in rows]
        with self.sparing("observing failed"):
            report = router.report(
                names,
                sampled,
                [step.verified.get(name, 0) for name in names],
                [state.num_tokens for state in states],
                step.step_tokens,
            )
            report.usual, stopped = self.usual, router.counters.stopped
            before = report.advanced["slot"].copy()
            router.observe(report)
            self.ended = ()
            if router.counters.stopped > stopped:
                over = np.flatnonzero((before >= 0) & (report.advanced["slot"] < 0))
                self.ended = [names[index] for index in over.tolist()]
        return report

    def _set_budget(self, report: StepReport, step: BatchStep, rows: Sequence[int]) -> None:
        """Fill in the budget of the next step. Mutates ``report``."""
        waiting = 0  # prompt tokens left to prefill
        if len(rows) < len(step.names):
            for state, name, tokens in zip(step.states, step.names, step.sampled, strict=True):
                if not tokens:
                    waiting += state.num_tokens - state.num_computed_tokens - step.scheduled[name]
        limits, most = step.limits, step.limits.step_tokens
        full = step.step_tokens >= most
        report.budget = room(len(step.names), limits.vocabulary, most, waiting, full=full)
        if not limits.chunked:
            self._steps += 1  # a prompt that is prefilled whole may need the whole budget
            report.budget *= self._steps % DRAFTS_SHARE > 0
        report.unable, report.waiting, report.capacity = self.unread, waiting, most

    def _longest_of(self, step: BatchStep, rows: Sequence[int]) -> int | NDArray[np.int64]:
        """Longest draft, of all requests or of each in ``rows``."""
        assert self.worker is not None, "only the leading rank decides"
        longest, table = min(self._longest, step.longest), self.worker.router.costs.table
        bound = [
            getattr(state.sampling_params, "structured_outputs", None) is not None
            for state in step.states
        ]
        if table is NOMINAL or not any(bound):  # the nominal table has no unit of time
            return longest
        few = min(longest, under_grammar(sum(bound), table.time(len(bound))))
        return np.where(bound, few, longest)[rows]

    def _start(self, row: int, step: BatchStep) -> None:
        """Start a request in the router, with its text so far."""
        assert self.worker is not None, "only the leading rank decides"
        state, name = step.states[row], step.names[row]
        text = text_of(state, step.ids_of(row), len(step.sampled[row]))
        if text is None:
            return
        prompt, output = text
        if output:
            self._restarts[name] += 1
        assert self._identities is not None
        params, longest = state.sampling_params, step.limits.max_model_len
        options = options_of(name, params, longest, self._identities)
        self.worker.router.start(name, prompt, options, output)

    def time(self, ours: bool) -> None:
        """Attribute the time from now on to this plugin, or to vLLM and its drafter."""
        if self.worker is not None:
            timer = self.worker.router.timer
            timer.enter() if ours else timer.leave()

    def _count(self, what: str) -> None:
        """Count and log the exception being handled."""
        if self.worker is not None:
            self.worker.faults += 1
        self.limited_log.exception(what)

    @contextmanager
    def sparing(self, what: str) -> Iterator[None]:
        """Suppress an exception: it is counted, and logged under ``what``."""
        try:
            yield
        except Exception:  # noqa: BLE001 - logged
            self._count(what)


def _given(
    chosen: Decisions, most: int | NDArray[np.int64], reach: NDArray[np.int64], vocabulary: int
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """The cache draft of each request, and the longest model draft that it may have.

    A cache draft ends before the first token outside of the target's vocabulary, such as a
    placeholder in a prompt.

    Args:
        most: longest draft of each.
        reach: tokens of each that the drafter has room for.
    """
    lens = np.minimum(chosen.lengths, most)
    wanted = chosen.rooms * (chosen.arms == MODEL)
    rooms = np.maximum(np.minimum(np.minimum(wanted, reach), most), 0)
    tokens = chosen.tokens[:, : int(lens.max(initial=0))]
    invalid = tokens.view(np.uint32) >= vocabulary  # or below 0
    if invalid.any():
        first = np.where(invalid.any(1), invalid.argmax(1), tokens.shape[1])
        lens = np.minimum(lens, first[chosen.drafts])
    listed = tokens.tolist()
    return [
        listed[draft][:length] if length else []
        for draft, length in zip(chosen.drafts.tolist(), lens.tolist(), strict=True)
    ], rooms
