"""The adapter of a V1 runner: each step's drafts are made behind it, by a drafter that reads late.

What the drafter must still read of requests that end is read in ``before_step``; ``propose`` stands
for ``decide`` and ``drafted``, with the drafter's pass between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from decoder.engines.vllm.adapter import Adapter
from decoder.engines.vllm.batch_step import BatchStep, EngineLimits
from decoder.engines.vllm.plan import Plan
from decoder.engines.vllm.v1.drafter import MUCH, LateDrafter
from decoder.engines.vllm.v1.prefill_budget import PrefillBudget


class V1Adapter(Adapter):
    """Writes ``num_spec_tokens_to_schedule`` of a ``SchedulerOutput``, too: that tells vLLM's
    drafter how many tokens to make.
    """

    def __init__(
        self,
        *args: Any,
        late: LateDrafter | None = None,
        shares_blocks: bool = True,
        reading: PrefillBudget | None = None,
        **rest: Any,
    ) -> None:
        """Put an adapter together.

        Args:
            late: the drafter that reads late, of one rank alone; None where there is none, or it
                reads at every step.
            shares_blocks: whether an ended request's blocks may serve others (prefix caching).
            reading: whether ``late`` reads what begins; None: it always does.
        """
        super().__init__(*args, **rest)
        self.late = late
        self.reading = reading
        self._shares_blocks = shares_blocks
        self._hits = False  # whether a request of the step under way began in others' blocks
        self._full = False  # whether no more of the step can be set aside

    def begin_step(self, scheduler_output: Any) -> None:
        """Let go of the requests that ended, before their blocks serve others."""
        self.before_step(scheduler_output.finished_req_ids)
        late = self.late
        if late is None:
            return
        with self.sparing("the drafter could not read on"):
            lost = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
            try:
                if lost and self._shares_blocks and not self.idle:
                    with torch.inference_mode():
                        late.leave(lost)
            except Exception:
                late.clear(missed=True)
                raise
            finally:
                for name in lost:
                    late.end(name)
            self.time(ours=True)
            late.scheduled(scheduler_output)
            self.time(ours=False)
            cached = scheduler_output.scheduled_cached_reqs
            self._hits = bool(cached.resumed_req_ids) or any(
                new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
            )

    def propose(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled: Sequence[Sequence[int]],
        draft: Callable[[], Any],
    ) -> list[list[int]]:
        """Observe what the step committed; the draft of each request of the batch, in its order.

        Args:
            sampled: tokens committed by row; none where a prompt is only partly read.
            draft: vLLM's own method, which runs the drafter; it gives rows of tokens.
        """
        names = list(runner.input_batch.req_ids)
        if self.late is not None and not self.idle:
            self.time(ours=True)
            self._meet(self.late, names, scheduler_output)
        plan = self.decide(len(names), lambda: step_of(runner, names, scheduler_output, sampled))
        if self.idle:
            return [[] for _ in names]
        made = self._made(scheduler_output, names, plan, draft)
        drafts = plan.proposals(made)
        self.drafted([len(tokens) for tokens in drafts], plan.k if any(made) else 0)
        return drafts

    def failed(self) -> None:
        """Count the exception being handled, of the model drafter, which made nothing.

        What was set aside is dropped, and requests under way have no more model drafts, for which
        the drafter would miss that text.
        """
        super().failed()
        if self.late is not None:
            self.late.clear(missed=True)

    def rest(self, why: str) -> None:
        """Draft nothing and report nothing from now on; requests go on as in plain vLLM."""
        super().rest(why)
        if self.late is not None:
            self.late.clear()

    def _meet(self, late: LateDrafter, names: Sequence[str], scheduler_output: Any) -> None:
        """See which of the step's requests are read, and whether there is room to read later."""
        with self.sparing("the drafter could not follow"):
            # An ended request's blocks may be given to a later prompt that begins alike.
            late.meet(names, reads=self.reading is None or self.reading.allows)
            self.unread = late.skipped.intersection(names)
            self.usual = late.caught_up < MUCH
            scheduled = scheduler_output.num_scheduled_tokens
            self._full = late.full(sum(scheduled[n] for n in names if n not in self.unread))

    def _made(
        self,
        scheduler_output: Any,
        names: Sequence[str],
        plan: Plan,
        draft: Callable[[], Any],
    ) -> list[list[int]]:
        """Run the model drafter as planned; its drafts in rows, none where it made none."""
        if not self.has_model:
            return []
        self.time(ours=True)
        if self.late is not None:
            ended = self.ended is None or any(name not in self.unread for name in self.ended)
            self.late.names, self.late.catch_up = names, self._hits or self._full or ended
            with self.sparing("reading could not be weighed"):
                self._weigh_reading(scheduler_output.total_num_scheduled_tokens, len(names))
        scheduler_output.num_spec_tokens_to_schedule = plan.k
        self.time(ours=False)
        try:
            drafts = draft()
            return list(drafts.tolist()) if plan.k else []
        except Exception:  # noqa: BLE001 - told by the limited_log
            self.failed()
            return []

    def _weigh_reading(self, tokens: int, rows: int) -> None:
        if self.reading is None or self.worker is None:
            return
        router, table = self.worker.router, self.worker.router.costs.table
        if router.worth_us is not None:
            self.reading.observe(tokens, table.slope, router.worth_us, table.time(rows))


def step_of(
    runner: Any, names: Sequence[str], output: Any, sampled: Sequence[Sequence[int]]
) -> BatchStep:
    """The step that a ``GPUModelRunner`` ran by its ``SchedulerOutput``."""
    requests, ids = runner.requests, runner.input_batch.token_ids_cpu
    # places kept, or drafts refused by a grammar, are marked with -1 by the scheduler
    scheduled = output.scheduled_spec_decode_tokens.items()
    drafts = {name: len(tokens) - tokens.count(-1) for name, tokens in scheduled}
    scheduler = runner.scheduler_config
    limits = EngineLimits(
        runner.input_batch.vocab_size, runner.max_model_len,
        runner.effective_drafter_max_model_len, scheduler.max_num_scheduled_tokens,
        scheduler.enable_chunked_prefill,
    )  # fmt: skip
    return BatchStep(
        limits, names, [requests[name] for name in names], sampled, drafts,
        output.num_scheduled_tokens, output.total_num_scheduled_tokens,
        output.num_spec_tokens_to_schedule, lambda row: ids[row],
    )  # fmt: skip
