"""Host-side mirror of a V2 runner's requests.

vLLM's own state of a request is on the device. Here its text is tracked from the scheduler's output
at its start, and from the tokens that each step commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoder.engines.vllm.batch_step import BatchStep, EngineLimits, has_text
from decoder.engines.vllm.ranks import Plan


@dataclass(slots=True)
class Request:
    """One request."""

    prompt: list[int] | None  # None: no drafts, see has_text
    prompt_len: int
    output: list[int]
    computed: int  # tokens that the target has run
    parameters: Any  # vLLM's SamplingParams
    over: bool = False
    """Whether vLLM will end it, by its output."""
    ended: bool = False
    """Whether it was over before this step, which was scheduled ahead and is discarded."""

    @classmethod
    def of(cls, new: Any) -> Request:
        """The request of a ``NewRequestData``, new or resumed after preemption."""
        prompt = new.prompt_token_ids if has_text(new) else None
        output = list(new.prefill_token_ids[new.prompt_len :])
        return cls(prompt, new.prompt_len, output, new.num_computed_tokens, new.sampling_params)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_len + len(self.output)

    def write(self, tokens: Sequence[int], max_model_len: int) -> None:
        """Append committed tokens, and check for the request's end. Mutates."""
        self.ended = self.over
        if self.ended:
            return
        self.output.extend(tokens)
        given = self.parameters
        most = min(given.max_tokens or max_model_len, max_model_len - self.prompt_len)
        stops = {*(given.stop_token_ids or ()), given.eos_token_id}
        self.over = len(self.output) >= most or not stops.isdisjoint(tokens)


@dataclass
class Batch:
    """The requests of one runner, and its current step; ``lengths`` are those of the drafts on the
    device, by request."""

    runner: Any
    requests: dict[str, Request] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    step: Any = None
    """The step's ``SchedulerOutput``, trimmed to the real lengths of drafts."""
    placed: dict[str, int] = field(default_factory=dict)
    """Draft tokens scheduled, by request of the step."""
    verified: dict[str, int] = field(default_factory=dict)
    """Draft tokens verified, by request of the step."""

    def __post_init__(self) -> None:
        self._vocabulary = self.runner.vllm_config.model_config.get_vocab_size()

    @property
    def limits(self) -> EngineLimits:
        """Limits of the engine; vLLM may reduce ``max_model_len`` to its memory."""
        scheduler, longest = self.runner.vllm_config.scheduler_config, self.runner.max_model_len
        drafter = self.runner.speculative_config.draft_model_config
        return EngineLimits(
            self._vocabulary, longest,
            min(longest, drafter.max_model_len) if drafter is not None else 0,
            scheduler.max_num_scheduled_tokens, scheduler.enable_chunked_prefill,
        )  # fmt: skip

    def begin(self, output: Any) -> None:
        """Update the requests by a ``SchedulerOutput``: new, continued and finished ones."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = Request.of(new)
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.requests[name].computed = computed

    def trimmed(self, output: Any) -> Any:
        """A copy of a ``SchedulerOutput`` without placeholders of tokens that no draft has."""
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.lengths.pop(name, None)
        scheduled, drafts = dict(output.num_scheduled_tokens), {}
        for name, placeholders in output.scheduled_spec_decode_tokens.items():
            length = min(len(placeholders), self.lengths.get(name, 0))
            scheduled[name] -= len(placeholders) - length
            if length:
                drafts[name] = placeholders[:length]
        self.placed = {n: len(each) for n, each in output.scheduled_spec_decode_tokens.items()}
        self.verified = {name: len(tokens) for name, tokens in drafts.items()}
        self.step = dataclasses.replace(
            output, num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )  # fmt: skip
        return self.step

    def masked(self, grammar: Any, every_place: bool) -> Any:
        """Grammar masks of the trimmed step, from a ``GrammarOutput`` of the scheduled one. Draft
        tokens that the grammar forbids are removed from ``verified``.

        Args:
            every_place: whether vLLM takes masks for all scheduled positions, and selects itself.
        """
        if grammar is None:
            return None
        names = grammar.structured_output_request_ids
        allowed = grammar.num_acceptable_drafts or [0] * len(names)
        rows, at = list[int](), 0
        for name, most in zip(names, allowed, strict=True):
            length = self.verified.get(name, 0)
            rows += range(at, at + length + 1)
            at += self.placed.get(name, 0) + 1
            if length:
                self.verified[name] = min(length, most)
        if every_place:
            return grammar
        return dataclasses.replace(grammar, grammar_bitmask=grammar.grammar_bitmask[rows])

    def commit(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Append the tokens that a step committed, by rows of the batch."""
        for name, tokens in zip(names, sampled, strict=True):
            if tokens:
                self.requests[name].write(tokens, self.runner.max_model_len)

    def report(
        self, names: Sequence[str], sampled: Sequence[Sequence[int]], most: int
    ) -> BatchStep:
        """The step's report; the next step reserves ``most`` draft tokens for a request."""
        states, scheduled = [self.requests[name] for name in names], self.step.num_scheduled_tokens
        waiting = sum(
            state.num_tokens - state.computed - scheduled[name]
            for state, name, tokens in zip(states, names, sampled, strict=True)
            if not tokens
        )

        def request_of(row: int) -> tuple[Any, Sequence[int], Any]:
            state, before = states[row], len(states[row].output) - len(sampled[row])
            has_drafts = state.prompt is not None and not state.ended
            prompt = np.array(state.prompt, np.int32) if has_drafts else None
            return prompt, state.output[:before], state.parameters

        verified = [self.verified.get(name, 0) for name in names]
        return BatchStep(
            self.limits, names, sampled, verified, [state.num_tokens for state in states], waiting,
            self.step.total_num_scheduled_tokens, most, request_of,
        )  # fmt: skip

    def chosen(self, names: Sequence[str], plan: Plan) -> list[int]:
        """Record and return the length of each row's next draft, from the cache or the model."""
        lengths = plan.lengths()
        self.lengths.update(zip(names, lengths, strict=True))
        return lengths
