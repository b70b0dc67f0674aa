"""What stands between one vLLM model runner and our router: it reports what really ran.

A step goes like this:

==================  ==============================================================================
``before_step``     requests that ended are stopped
``during_step``     the router does what the next choice can do without, while the target runs
``decide``          what was committed is observed, the next drafts are chosen
``drafted``         what was made of the choice is told
==================  ==============================================================================

Nothing in here raises into vLLM: a fault of ours costs a step its drafts, is counted, and is logged
at most once a minute.
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
"""A request that left the router is taken up again so often: what is wrong with it may stay."""


class Adapter:
    """The hybrid of one model runner; all its state is here."""

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
            longest: draft tokens of a request that the engine was started for.
        """
        self.worker = worker
        self.ranks = ranks or Ranks()
        self.limited_log = limited_log or LimitedLog()
        self.idle = ""
        """Why nothing is drafted any more; "" while all is well."""
        self.unread: Collection[str] = ()
        """Requests of the step that the model drafter does not read, nor drafts for."""
        self.usual = True
        """Whether the step did no work that had waited: else it says nothing of costs."""
        self.ended: Collection[str] | None = None
        """Requests that ended with the step; None where it could not be followed."""
        self.has_model = has_model
        self.profile: WorkerProfile | None = None
        self._longest = longest
        self._identities = Identities.load(worker.settings) if worker is not None else None
        self._restarts: Counter[str] = Counter()
        self._chosen: tuple[StepReport, list[int]] | None = None
        self._steps = 0
        self._closed = False

    def before_step(self, ended: Collection[str]) -> None:
        """Let go of the requests that ended."""
        self.time(ours=True)
        for name in ended:
            # Ends by limit or stop token were seen when they were committed; what is left ended
            # by a stop string or by the client.
            if self.worker is not None:
                with self.sparing("a request could not be stopped"):
                    self.worker.router.stop(name, "abort")
            self._restarts.pop(name, None)
        self.time(ours=False)

    def during_step(self, exposed: bool) -> None:
        """Do what the next choice can do without; on a GPU the target's pass has just begun.

        Args:
            exposed: whether the engine waits for it.
        """
        if self.worker is None:
            return
        with self.sparing("bookkeeping failed"):
            self.worker.router.settle(exposed)

    def after_step(self, idle: bool) -> None:
        """Go on with a profile that is in doubt, where no request is there: vLLM runs a step of no
        tokens when the last one has ended."""
        profile = self.profile
        if not idle or profile is None or not profile.doubted or self.idle:
            return
        with self.sparing("steps cannot be profiled: costs are learned from service alone"):
            costs = profile.take(IDLE_SECONDS)
            if costs is not None and self.worker is not None:
                self.worker.router.costs = costs

    def decide(self, size: int, step: Callable[[], BatchStep]) -> Plan:
        """Observe what a step committed, and choose what to draft next for the requests of the
        batch, in its order. :meth:`drafted` is to be told what came of it.

        Args:
            size: requests of the batch.
            step: reports it; called on the rank that leads.
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
        """Take in what was made of a plan: by row of the batch the length that will be verified at
        most, and how many tokens the model drafter made."""
        self.time(ours=True)
        if self.worker is not None and not self.idle:
            with self.sparing("the router could not be told what was drafted"):
                if self._chosen is not None:
                    report, rows = self._chosen
                    if len(rows) < len(lengths):
                        lengths = [lengths[row] for row in rows]
                    self.worker.router.drafted(report, lengths, k)
        self.time(ours=False)

    def failed(self) -> None:
        """Count the exception being handled, of the model drafter, which made nothing. Ends the
        process where there are several ranks: the others may have gone on."""
        if self.ranks.size > 1:
            self.ranks.end("its model drafter failed, and others may go on.")
        self._count("the model drafter failed: this step goes on without its drafts")

    def rest(self, why: str) -> None:
        """Draft nothing and report nothing from now on; requests go on as in plain vLLM."""
        if self.idle:
            return
        self.idle = why
        self.limited_log.warning("no drafts any more: %s", why)
        self.close()  # policies, telemetry, a name among workers: all belong to other weights

    def close(self) -> None:
        """Send what is left; the runner is going down, or drafts no more."""
        if self.worker is not None and not self._closed:
            with self.sparing("the worker could not be closed"):
                self.worker.close()
                self._closed = True

    def _decided(self, step: BatchStep) -> Plan:
        assert self.worker is not None, "only the rank that leads decides"
        slots, size = self.worker.router.table.slots, len(step.names)
        for row in [row for row, name in enumerate(step.names) if name not in slots]:
            if self._restarts.get(step.names[row], 0) < RESTARTS:
                with self.sparing("a request could not be taken up"):
                    self._take_up(row, step)
        rows = [row for row, tokens in enumerate(step.sampled) if tokens]
        report = self._observed(step, rows)
        if report is None:
            return Plan.nothing(size)
        chosen: Decisions | None = None
        with self.sparing("choosing drafts failed: this step goes on without drafts"):
            self._make_room(report, step, rows)
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
        """The report of a step that advanced these ``rows``, as far as the router takes it in."""
        assert self.worker is not None, "only the rank that leads decides"
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
                self.ended = [names[place] for place in over.tolist()]
        return report

    def _make_room(self, report: StepReport, step: BatchStep, rows: Sequence[int]) -> None:
        """Fill in what the next step has room for. Mutates ``report``."""
        waiting = 0  # tokens of prompts only partly read: nothing of them was committed yet
        if len(rows) < len(step.names):
            for state, name, tokens in zip(step.states, step.names, step.sampled, strict=True):
                if not tokens:
                    waiting += state.num_tokens - state.num_computed_tokens - step.scheduled[name]
        limits, most = step.limits, step.limits.step_tokens
        full = step.step_tokens >= most
        report.budget = room(len(step.names), limits.vocabulary, most, waiting, full=full)
        if not limits.chunked:
            self._steps += 1  # a prompt that is read whole may need all the room there is
            report.budget *= self._steps % DRAFTS_SHARE > 0
        report.unable, report.waiting, report.capacity = self.unread, waiting, most

    def _longest_of(self, step: BatchStep, rows: Sequence[int]) -> int | NDArray[np.int64]:
        """Draft tokens at most, of all requests or of each in ``rows``."""
        assert self.worker is not None, "only the rank that leads decides"
        longest, table = min(self._longest, step.longest), self.worker.router.costs.table
        bound = [
            getattr(state.sampling_params, "structured_outputs", None) is not None
            for state in step.states
        ]
        if table is NOMINAL or not any(bound):  # that has no unit of time yet
            return longest
        few = min(longest, under_grammar(sum(bound), table.time(len(bound))))
        return np.where(bound, few, longest)[rows]

    def _take_up(self, row: int, step: BatchStep) -> None:
        """Let the router follow a request that it does not, with the text that it has by now."""
        assert self.worker is not None, "only the rank that leads decides"
        state, name = step.states[row], step.names[row]
        text = text_of(state, step.ids_of(row), len(step.sampled[row]))
        if text is None:
            return
        prompt, output = text
        if output:
            self._restarts[name] += 1
        assert self._identities is not None
        asked, longest = state.sampling_params, step.limits.max_model_len
        options = options_of(name, asked, longest, self._identities)
        self.worker.router.start(name, prompt, options, output)

    def time(self, ours: bool) -> None:
        """Say whether what follows is done by us, or by vLLM and its drafter."""
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
        """Spare vLLM an exception of ours: it is counted, and logged under ``what``."""
        try:
            yield
        except Exception:  # noqa: BLE001 - told by the limited_log
            self._count(what)


def _given(
    chosen: Decisions, most: int | NDArray[np.int64], reach: NDArray[np.int64], vocabulary: int
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """The cache draft of each request, and tokens of a model draft that it may have.

    A cache draft ends before the first token that the target has no logit for: a prompt may hold
    such marks.

    Args:
        most: draft tokens of each at most.
        reach: tokens of each that the drafter has room for.
    """
    lens = np.minimum(chosen.lengths, most)
    asked = chosen.rooms * (chosen.arms == MODEL)
    rooms = np.maximum(np.minimum(np.minimum(asked, reach), most), 0)
    tokens = chosen.tokens[:, : int(lens.max(initial=0))]
    strange = tokens.view(np.uint32) >= vocabulary  # or below 0
    if strange.any():
        first = np.where(strange.any(1), strange.argmax(1), tokens.shape[1])
        lens = np.minimum(lens, first[chosen.drafts])
    listed = tokens.tolist()
    return [
        listed[draft][:length] if length else []
        for draft, length in zip(chosen.drafts.tolist(), lens.tolist(), strict=True)
    ], rooms
