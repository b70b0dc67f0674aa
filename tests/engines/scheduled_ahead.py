"""The engine without networks once more, as vLLM's V2 runner has it: steps are scheduled ahead."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from decoder.engines.vllm.adapter import Adapter
from decoder.engines.vllm.requirements import longest_draft
from decoder.engines.vllm.v2.batch import Batch
from tests.engines.configs import on_v2
from tests.engines.scheduled import Scheduled


@dataclass
class Ahead(Scheduled):
    """``queue`` steps are scheduled before what the first one commits is known."""

    queue: int = 2
    deferring: bool = False
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        on_v2(self.config)
        self.config.scheduler_config.async_scheduling = self.queue > 1
        super().__post_init__()
        longest = longest_draft(self.config)
        self.adapter = Adapter(self.worker, longest, has_model=self.has_model)
        self.batch = Batch(
            SimpleNamespace(
                vllm_config=self.config, device=torch.device("cpu"),
                max_model_len=self.config.model_config.max_model_len,
                speculative_config=self.config.speculative_config,
            )
        )  # fmt: skip
        self.texts: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.device: dict[str, list[int]] = {}  # drafts that wait there
        self.under_way: list[tuple[Any, Any]] = []
        self.verified = 0

    @property
    def scheduler_class(self) -> Any:
        from vllm.v1.core.sched.scheduler import Scheduler

        from decoder.engines.vllm.v2.scheduler import HybridScheduler

        return HybridScheduler if self.queue > 1 else Scheduler

    def step(self) -> None:
        """Schedule as far ahead as may be, then take in the first step."""
        from vllm.v1.outputs import DraftTokenIds

        while len(self.under_way) < self.queue and self.scheduler.has_requests():
            out = self.scheduler.schedule()
            self.under_way.append((out, self._work(out)))
        out, made = self.under_way.pop(0)
        self.take(out, made)
        if self.queue == 1 and made.req_ids:
            drafts = [[-1] * self.batch.lengths[name] for name in made.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(made.req_ids, drafts))

    def _work(self, out: Any) -> Any:
        """What the runner does of a step, on the device and on the host."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        from decoder.engines.vllm.v2.scheduler import VERIFIED

        self.preemptions += len(out.preempted_req_ids or ())
        self.adapter.before_step(out.finished_req_ids)
        self.batch.begin(out)
        untouched = dict(out.num_scheduled_tokens), dict(out.scheduled_spec_decode_tokens)
        step = self.batch.trimmed(out)
        assert untouched == (out.num_scheduled_tokens, out.scheduled_spec_decode_tokens)
        for new in out.scheduled_new_reqs:
            self.texts[new.req_id] = list(new.prefill_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
        if not step.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.adapter.during_step(exposed=True)
        drafts = step.scheduled_spec_decode_tokens
        names = sorted(step.num_scheduled_tokens, key=lambda name: not drafts.get(name))
        sampled = [
            self._verify(name, step.num_scheduled_tokens[name], len(drafts.get(name, ())))
            for name in names
        ]
        verified = self.batch.verified
        self.batch.commit(names, sampled)
        most = out.num_spec_tokens_to_schedule
        step = functools.partial(self.batch.report, names, sampled, most)
        plan = self.adapter.decide(len(names), step)
        lengths = self.batch.chosen(names, plan)
        for name, given, length in zip(names, plan.cached, lengths, strict=True):
            at = len(self.texts[name])
            model = [*self.script(name)[at : at + self.right], *[1] * length][:length]
            self.device[name] = list(given) or [int(token) for token in model]
        self.adapter.drafted(lengths, plan.k if any(plan.limits) else 0)
        self.longest_seen = max(self.longest_seen, *lengths)
        made = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
        setattr(made, VERIFIED, verified)
        return made

    def _verify(self, name: str, scheduled: int, drafted: int) -> list[int]:
        text, at = self.texts[name], self.computed[name] + scheduled - drafted
        assert at <= len(text), "a token is read that is none"
        if at < len(text):
            self.computed[name] = at
            return []
        draft = self.device.get(name, [])
        assert drafted <= len(draft), "a place is verified that has no token"
        truth = [int(t) for t in self.script(name)[at : at + drafted + 1]]
        accepted = 0
        while accepted < drafted and draft[accepted] == truth[accepted]:
            accepted += 1
        self.verified += drafted
        self.told.append((name, len(draft), drafted))
        text += truth[: accepted + 1]
        self.computed[name] = at + accepted
        return truth[: accepted + 1]
