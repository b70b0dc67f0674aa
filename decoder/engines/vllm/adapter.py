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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.complaints import Complaints
from decoder.core.guards.draft_budget import DRAFTS_SHARE, room, under_grammar
from decoder.core.requests import Decisions, StepReport
from decoder.engines.vllm.asked import options_of, text_of
from decoder.engines.vllm.plan import Plan
from decoder.engines.vllm.ranks import Ranks
from decoder.policy.pricing import NOMINAL
from decoder.policy.rule import MODEL
from decoder.tenancy.identities import Identities

if TYPE_CHECKING:
    from decoder.worker import Worker

RESTARTS: Final = 2
"""A request that left the router is taken up again so often: what is wrong with it may stay."""


class Adapter:
    """The hybrid of one model runner; all its state is here.

    Its methods take what vLLM's own ``GPUModelRunner`` and ``SchedulerOutput`` have, read only.
    """

    def __init__(
        self,
        worker: Worker | None,
        longest: int,
        *,
        has_model: bool = False,
        complaints: Complaints | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Put an adapter together.

        Args:
            worker: None on a rank that follows another's decisions.
            longest: draft tokens of a request that the engine was started for.
        """
        self.worker = worker
        self.ranks = ranks or Ranks()
        self.complaints = complaints or Complaints()
        self.idle = ""
        """Why nothing is drafted any more; "" while all is well."""
        self.unread: Collection[str] = ()
        """Requests of the step that the model drafter does not read, nor drafts for."""
        self.usual = True
        """Whether the step did no work that had waited: else it says nothing of costs."""
        self.ended: Collection[str] | None = None
        """Requests that ended with the step; None where it could not be followed."""
        self.has_model = has_model
        self._longest = longest
        self._identities = Identities.load(worker.settings) if worker is not None else None
        self._restarts: Counter[str] = Counter()
        self._chosen: tuple[StepReport, list[int]] | None = None
        self._steps = 0
        self._closed = False

    def before_step(self, runner: Any, scheduler_output: Any) -> None:
        """Let go of the requests that ended."""
        self.time(ours=True)
        for name in scheduler_output.finished_req_ids:
            # Ends by limit or stop token were seen when they were committed; what is left ended
            # by a stop string or by the client.
            if self.worker is not None:
                with self.sparing("a request could not be stopped"):
                    self.worker.router.stop(name, "abort")
            self._restarts.pop(name, None)
        self.time(ours=False)

    def during_step(self, runner: Any) -> None:
        """Do what the next choice can do without; on a GPU the target's pass has just begun."""
        if self.worker is None:
            return
        with self.sparing("bookkeeping failed"):
            self.worker.router.settle(exposed=runner.device.type == "cpu")

    def decide(self, runner: Any, scheduler_output: Any, sampled: Sequence[Sequence[int]]) -> Plan:
        """Observe what the step committed, and choose what to draft next for the requests of the
        batch, in its order. :meth:`drafted` is to be told what came of it.

        Args:
            sampled: tokens committed by row; none where a prompt is only partly read.
        """
        self.ended = self._chosen = None
        names = list(runner.input_batch.req_ids)
        if self.idle:
            return Plan.nothing(len(names))
        self.time(ours=True)
        longest = min(self._longest, scheduler_output.num_spec_tokens_to_schedule)
        plan = self.ranks.agree(
            len(names),
            lambda: self._decided(runner, scheduler_output, sampled, names, longest),
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
                    self.worker.router.drafted(report, [lengths[row] for row in rows], k)
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
        self.complaints.warning("no drafts any more: %s", why)
        self.close()  # policies, telemetry, a name among workers: all belong to other weights

    def close(self) -> None:
        """Send what is left; the runner is going down, or drafts no more."""
        if self.worker is not None and not self._closed:
            with self.sparing("the worker could not be closed"):
                self.worker.close()
                self._closed = True

    def _decided(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled: Sequence[Sequence[int]],
        names: Sequence[str],
        longest: int,
    ) -> Plan:
        assert self.worker is not None, "only the rank that leads decides"
        router = self.worker.router
        verified = scheduler_output.scheduled_spec_decode_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        requests, max_model_len = runner.requests, runner.max_model_len
        states = [requests[name] for name in names]
        lengths = [state.num_tokens for state in states]
        slots = router.table.slots
        for row in [row for row, name in enumerate(names) if name not in slots]:
            if self._restarts.get(names[row], 0) < RESTARTS:
                with self.sparing("a request could not be taken up"):
                    self._take_up(row, names[row], len(sampled[row]), runner, max_model_len)
        rows = [row for row, tokens in enumerate(sampled) if tokens]
        waiting = 0  # tokens of prompts only partly read: nothing of them was committed yet
        if len(rows) < len(names):
            for state, name, tokens in zip(states, names, sampled, strict=True):
                if not tokens:
                    waiting += state.num_tokens - state.num_computed_tokens - scheduled[name]
        stepped = names if len(rows) == len(names) else [names[row] for row in rows]
        report: StepReport | None = None
        with self.sparing("observing failed"):
            report = router.report(
                stepped,
                [sampled[row] for row in rows],
                # Places kept or drafts refused by a grammar are marked with -1 by the scheduler.
                [_really(verified.get(name, ())) for name in stepped],
                [lengths[row] for row in rows],
                scheduler_output.total_num_scheduled_tokens,
            )
            followed = report.advanced["slot"] >= 0
            report.usual, report.others = self.usual, len(stepped) - int(followed.sum())
            router.observe(report)
            over = np.flatnonzero(followed & (report.advanced["slot"] < 0))
            self.ended = [stepped[place] for place in over.tolist()]
        if report is None:
            return Plan.nothing(len(names))
        known = runner.input_batch.vocab_size
        chosen: Decisions | None = None
        with self.sparing("choosing drafts failed: this step goes on without drafts"):
            budget = runner.scheduler_config.max_num_scheduled_tokens
            most = room(len(names), known, budget, waiting, full=report.step_tokens >= budget)
            if not runner.scheduler_config.enable_chunked_prefill:
                self._steps += 1  # a prompt that is read whole may need all the room there is
                most *= self._steps % DRAFTS_SHARE > 0
            report.budget, report.unable = most, self.unread
            report.waiting, report.capacity = waiting, budget
            chosen = router.choose(report)
        if chosen is None:
            return Plan.nothing(len(names))
        self._chosen = report, rows
        end = runner.effective_drafter_max_model_len if self.has_model else 0
        most_of = np.array(self._longest_of(states, longest))[rows]
        reach = end - report.advanced["length"]
        given, rooms = _given(chosen, most_of, reach, known)
        k = min(int(rooms.max(initial=0)), self.worker.settings.model_draft_tokens)
        return Plan.of(len(names), rows, given, rooms.tolist(), k)

    def _longest_of(self, states: Sequence[Any], longest: int) -> list[int]:
        """Draft tokens of each request at most."""
        assert self.worker is not None, "only the rank that leads decides"
        table = self.worker.router.costs.table
        bound = [
            getattr(state.sampling_params, "structured_outputs", None) is not None
            for state in states
        ]
        if table is NOMINAL or not any(bound):  # that has no unit of time yet
            return [longest] * len(states)
        few = min(longest, under_grammar(sum(bound), table.time(len(states))))
        return [few if is_bound else longest for is_bound in bound]

    def _take_up(self, row: int, name: str, sampled: int, runner: Any, max_model_len: int) -> None:
        """Let the router follow a request that it does not, with the text that it has by now."""
        assert self.worker is not None, "only the rank that leads decides"
        state = runner.requests[name]
        text = text_of(state, runner.input_batch.token_ids_cpu[row], sampled)
        if text is None:
            return
        prompt, output = text
        if output:
            self._restarts[name] += 1
        assert self._identities is not None
        options = options_of(name, state.sampling_params, max_model_len, self._identities)
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
        self.complaints.exception(what)

    @contextmanager
    def sparing(self, what: str) -> Iterator[None]:
        """Spare vLLM an exception of ours: it is counted, and logged under ``what``."""
        try:
            yield
        except Exception:  # noqa: BLE001 - told by the complaints
            self._count(what)


def _given(
    chosen: Decisions, most: NDArray[np.int64], reach: NDArray[np.int64], vocabulary: int
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


def _really(tokens: Sequence[int]) -> int:
    """How many of ``tokens`` are any."""
    return len(tokens) - tokens.count(-1) if tokens else 0
