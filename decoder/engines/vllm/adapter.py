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

from decoder.core.guards.draft_budget import DRAFTS_SHARE, room, under_grammar
from decoder.core.requests import Decisions, Outcomes
from decoder.engines.vllm.plan import Plan
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
    """The hybrid of one model runner; all its state is here.

    Its methods take what vLLM's own ``GPUModelRunner`` and ``SchedulerOutput`` have, read only.
    """

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
        self._longest = longest
        self._identities = Identities.load(worker.settings) if worker is not None else None
        self._restarts: Counter[str] = Counter()
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
        self.ended = None
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

    def drafted(self, names: Sequence[str], lengths: Sequence[int], k: int) -> None:
        """Take in what was made of a plan: lengths as they will be verified at most, and how many
        tokens the model drafter made."""
        self.time(ours=True)
        if self.worker is not None and not self.idle:
            with self.sparing("the router could not be told what was drafted"):
                self.worker.router.drafted(names, lengths, k)
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
        step_tokens = scheduler_output.total_num_scheduled_tokens
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
        # Places kept or drafts refused by a grammar are marked with -1 by the scheduler.
        really = [_really(verified.get(name, ())) for name in stepped]
        followed = [name for name in stepped if name in slots]
        with self.sparing("observing failed"):
            outcomes = Outcomes.flat(
                stepped, [sampled[row] for row in rows], really, [lengths[row] for row in rows]
            )
            router.observe(outcomes, step_tokens, self.usual)
        live = [name for name in followed if name in slots]
        self.ended = {*followed}.difference(live) if len(live) < len(followed) else ()
        known = runner.input_batch.vocab_size
        chosen: Decisions | None = None
        with self.sparing("choosing drafts failed: this step goes on without drafts"):
            budget = runner.scheduler_config.max_num_scheduled_tokens
            most = room(len(names), known, budget, waiting, full=step_tokens >= budget)
            if not runner.scheduler_config.enable_chunked_prefill:
                self._steps += 1  # a prompt that is read whole may need all the room there is
                most *= self._steps % DRAFTS_SHARE > 0
            others = len(rows) - len(followed)
            beside = min(waiting, max(budget - len(live) - others, 0))
            chosen = router.choose(live, most, self.unread, others=others, beside=beside)
        if chosen is None:
            return Plan.nothing(len(names))
        end = runner.effective_drafter_max_model_len if self.has_model else 0
        most_of = self._longest_of(states, longest)
        given, rooms = self._given(chosen, names, live, lengths, most_of, end, known)
        k = min(max(rooms, default=0), self.worker.settings.model_draft_tokens)
        return Plan(given, rooms, k)

    def _given(
        self,
        chosen: Decisions,
        names: Sequence[str],
        live: Sequence[str],
        lengths: Sequence[int],
        most_of: Sequence[int],
        end: int,
        vocabulary: int,
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """The cache draft of each request, and tokens of a model draft that it may have.

        A cache draft ends before the first token that the target has no logit for: a prompt may
        hold such marks.

        Args:
            live: those that ``chosen`` is of, in the order of ``names``.
            lengths: tokens of each request.
            most_of: draft tokens of each at most.
            end: tokens of a request that the drafter reaches to.
        """
        most = np.array(most_of)
        rooms = np.zeros(len(names), np.int64)
        lens = np.zeros(len(names), np.int64)
        place = np.arange(len(names))
        if len(live) < len(names):
            alive = {*live}
            place = np.array([row for row, n in enumerate(names) if n in alive], np.int64)
        drafts = np.zeros(len(names), np.int64)
        lens[place], drafts[place] = chosen.lengths, chosen.drafts
        lens = np.minimum(lens, most)
        asked = chosen.rooms * (chosen.arms == MODEL)
        rooms[place] = np.minimum(asked, end - np.array(lengths)[place])
        rooms = np.maximum(np.minimum(rooms, most), 0)
        tokens = chosen.tokens[:, : int(lens.max(initial=0))]
        strange = tokens.view(np.uint32) >= vocabulary  # or below 0
        if strange.any():
            first = np.where(strange.any(1), strange.argmax(1), tokens.shape[1])
            lens = np.minimum(lens, first[drafts])
        listed = tokens.tolist()
        given = tuple(
            tuple(listed[draft][:length]) if length else ()
            for draft, length in zip(drafts.tolist(), lens.tolist(), strict=True)
        )
        return given, tuple(rooms.tolist())

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
            underway = self.worker.router.underway
            underway.enter() if ours else underway.leave()

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


def _really(tokens: Sequence[int]) -> int:
    """How many of ``tokens`` are any."""
    return len(tokens) - tokens.count(-1) if tokens else 0
