"""The adapter of a V1 runner, with deferred drafter prefill: drafts are made at a step's end.

``begin_step`` prefills what the drafter still needs of requests that end. ``propose`` calls
``decide`` and ``drafted``, with the drafter's pass between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from decoder.core.guards.prefill_budget import PrefillBudget
from decoder.engines.vllm.adapter import Adapter
from decoder.engines.vllm.batch_step import BatchStep, EngineLimits
from decoder.engines.vllm.plan import Plan
from decoder.engines.vllm.v1.drafter import MUCH, LateDrafter


class V1Adapter(Adapter):
    """Also writes ``num_spec_tokens_to_schedule`` of a ``SchedulerOutput``, by which vLLM's drafter
    makes that many tokens."""

    def __init__(
        self,
        *args: Any,
        late: LateDrafter | None = None,
        shares_blocks: bool = True,
        reading: PrefillBudget | None = None,
        **kwargs: Any,
    ) -> None:
        """Put an adapter together.

        Args:
            late: the deferred drafter; None where there is no drafter, or its prefill runs in every
                step, as with several ranks.
            shares_blocks: whether other requests may reuse an ended request's blocks (prefix
                caching).
            reading: decides whether ``late`` prefills new requests; None: always.
        """
        super().__init__(*args, **kwargs)
        self.late = late
        self.reading = reading
        self._shares_blocks = shares_blocks
        self._hits = False  # whether a request of this step began with shared blocks
        self._full = False  # whether this step's tokens exceed the limit of deferred ones

    def begin_step(self, scheduler_output: Any) -> None:
        """Stop the requests that ended, before their blocks are reused."""
        self.before_step(scheduler_output.finished_req_ids)
        late = self.late
        if late is None:
            return
        with self.sparing("the drafter could not prefill an ended request"):
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
        """Observe the committed tokens; returns each request's draft, in the order of the batch.

        Args:
            sampled: committed tokens by row; none during a chunked prefill.
            draft: vLLM's own method, which runs the drafter and returns rows of tokens.
        """
        names = list(runner.input_batch.req_ids)
        if self.late is not None and not self.idle:
            self.time(ours=True)
            self._admit(self.late, names, scheduler_output)
        plan = self.decide(len(names), lambda: step_of(runner, names, scheduler_output, sampled))
        if self.idle:
            return [[] for _ in names]
        from_model = self._run_drafter(scheduler_output, names, plan, draft)
        drafts = plan.proposals(from_model)
        self.drafted([len(tokens) for tokens in drafts], plan.k if any(from_model) else 0)
        return drafts

    def failed(self) -> None:
        """Count the exception being handled, of the model drafter, which made no drafts.

        Deferred tokens are dropped. Running requests get no more model drafts, since the drafter's
        cache now misses that text.
        """
        super().failed()
        if self.late is not None:
            self.late.clear(missed=True)

    def rest(self, why: str) -> None:
        """Disable drafting and telemetry; requests go on as in plain vLLM."""
        super().rest(why)
        if self.late is not None:
            self.late.clear()

    def _admit(self, late: LateDrafter, names: Sequence[str], scheduler_output: Any) -> None:
        """Decide which new requests the drafter prefills, and whether to defer this step's."""
        with self.sparing("the drafter could not defer its prefill"):
            # Ended requests too: a later prompt with the same prefix may reuse their blocks.
            late.meet(names, reads=self.reading is None or self.reading.allows)
            self.unread = late.skipped.intersection(names)
            self.usual = late.caught_up < MUCH
            scheduled = scheduler_output.num_scheduled_tokens
            self._full = late.full(sum(scheduled[n] for n in names if n not in self.unread))

    def _run_drafter(
        self,
        scheduler_output: Any,
        names: Sequence[str],
        plan: Plan,
        draft: Callable[[], Any],
    ) -> list[list[int]]:
        """Run the model drafter as planned; its drafts by row, none where it makes none."""
        if not self.has_model:
            return []
        self.time(ours=True)
        if self.late is not None:
            ended = self.ended is None or any(name not in self.unread for name in self.ended)
            self.late.names, self.late.catch_up = names, self._hits or self._full or ended
            with self.sparing("the prefill budget could not be updated"):
                self._update_budget(scheduler_output.total_num_scheduled_tokens, len(names))
        scheduler_output.num_spec_tokens_to_schedule = plan.k
        self.time(ours=False)
        try:
            drafts = draft()
            return list(drafts.tolist()) if plan.k else []
        except Exception:  # noqa: BLE001 - logged
            self.failed()
            return []

    def _update_budget(self, tokens: int, rows: int) -> None:
        if self.reading is None or self.worker is None:
            return
        router, table = self.worker.router, self.worker.router.costs.table
        if router.model_gain_us is not None:
            self.reading.observe(tokens, table.slope, router.model_gain_us, table.time(rows))


def step_of(
    runner: Any, names: Sequence[str], output: Any, sampled: Sequence[Sequence[int]]
) -> BatchStep:
    """The step that a ``GPUModelRunner`` ran, from its ``SchedulerOutput``."""
    requests, ids = runner.requests, runner.input_batch.token_ids_cpu
    # the scheduler marks placeholders, and drafts refused by a grammar, with -1
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
