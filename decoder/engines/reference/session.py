"""The decoding loop of the reference engine: a session runs request after request.

A cycle is: choose, draft, verify, accept, observe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from decoder.contracts.errors import EngineError
from decoder.contracts.events import Arm
from decoder.core.requests import Decision, RequestOptions, StepReport
from decoder.core.router import DraftRouter
from decoder.engines.reference.acceptance import accept_greedy, accept_sampled, distribution
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.target import Read


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling at ``temperature`` > 0 from the full distribution; a ``seed`` fixes the output."""

    temperature: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise EngineError("temperature must be above 0: leave sampling out for greedy.")


@dataclass(frozen=True, slots=True)
class CycleRecord:
    """One decoding cycle; lengths in tokens, time in microseconds."""

    arm: Arm
    position: int  # output tokens committed before the cycle
    verified: int  # draft tokens verified
    accepted: int  # draft tokens committed
    us: float  # time to propose, decide, draft, run the target, and accept


@dataclass(frozen=True)
class Generation:
    """One finished request. The first token comes with the prefill and belongs to no cycle."""

    tokens: list[int]
    cycles: list[CycleRecord]
    finish: Literal["stop", "length"]
    decode_us: float
    """From the end of the prefill to the last token."""


class Session:
    """Decodes requests by a router, whose suffix cache keeps outputs for later requests.

    ``router.policy`` may be replaced at any time, as in a serving worker.
    """

    def __init__(self, engine: ReferenceEngine, router: DraftRouter, draft_tokens: int = 0) -> None:
        """``draft_tokens``: longest model draft, as the router has it; 0 without a model arm."""
        if draft_tokens and engine.head is None:
            raise EngineError("this method drafts with a model: load a drafter.")
        self.engine, self.router, self.draft_tokens = engine, router, draft_tokens
        self._requests = 0

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] | None = None,
        workload: str = "",
        tenant: str = "",
        speculate: bool = True,
    ) -> Generation:
        """Run one request to its end.

        Args:
            sampling: greedy by default.
            stop_ids: instead of the engine's.
            speculate: as the server's request option; False verifies no drafts.

        Raises:
            EngineError: the prompt is empty, or leaves no room in the context.
        """
        engine = self.engine
        if not prompt or max_tokens < 1 or len(prompt) >= engine.max_model_len:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens and {max_tokens} more do not fit the context of "
                f"{engine.max_model_len}: give at least one token of each, or a shorter prompt."
            )
        self._requests += 1
        options = RequestOptions(
            max_tokens=min(max_tokens, engine.max_model_len - len(prompt)),
            max_model_len=engine.max_model_len,
            stop_ids=engine.stop_ids if stop_ids is None else stop_ids,
            tenant=tenant,
            workload=workload,
            speculate=speculate,
        )
        request = _Request(self, f"request-{self._requests}", list(prompt), options, sampling)
        self.router.start(request.name, np.asarray(prompt, np.int32), options)
        try:
            return request.run()
        finally:
            self.router.stop(request.name, "abort")
            self.router.flush()


class _Request:
    """The state of the running request: caches and committed tokens."""

    _report: StepReport  # of the last step

    def __init__(
        self,
        session: Session,
        name: str,
        prompt: list[int],
        options: RequestOptions,
        sampling: Sampling | None,
    ) -> None:
        self.name, self.prompt, self.options = name, prompt, options
        self.output: list[int] = []
        self.cycles: list[CycleRecord] = []
        self.finish: Literal["stop", "length"] | None = None
        self._router, self._engine = session.router, session.engine
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed if sampling else 0)
        self._cache = self._engine.new_cache()
        self._drafter = self._engine.drafter(session.draft_tokens * options.speculate)

    @torch.inference_mode()
    def run(self) -> Generation:
        """Run to the end."""
        self.prefill()
        began = self._engine.clock()
        while not self.finish:
            self.cycle()
        decode_us = (self._engine.clock() - began) * 1e6
        return Generation(self.output, self.cycles, self.finish, decode_us)

    def prefill(self) -> None:
        """Read the prompt and commit the first token."""
        read = self._engine.target.run(self.prompt, self._cache, last=True)
        _, first = self._accept([], read)
        if self._drafter is not None and read.aux is not None:
            self._drafter.follow([*self.prompt[1:], first], read.aux)
            self._drafter.catch_up()
        self._commit([first], verified=0, step_tokens=len(self.prompt))

    def cycle(self) -> None:
        """Choose, draft, verify, accept, observe."""
        began = self._engine.clock()
        decision = self._router.choose(self._report)[0]
        draft = self._draft(decision)
        model_tokens = len(draft) if decision.arm == "model" else 0
        self._router.drafted(self._report, [len(draft)], model_tokens)
        read = self._engine.target.run([self.output[-1], *draft], self._cache)
        accepted, bonus = self._accept(draft, read)
        tokens = [*draft[:accepted], bonus]
        self._cache.crop(accepted - len(draft))  # negative: so many tokens are removed
        if self._drafter is not None and read.aux is not None:
            self._drafter.follow(tokens, read.aux[: len(tokens)])
        position, ended = len(self.output), self._engine.clock()
        self._commit(tokens, len(draft), 1 + len(draft))
        arm, kept = decision.arm if draft else "none", min(accepted, len(self.output) - position)
        us = (ended - began) * 1e6
        self.cycles.append(CycleRecord(arm, position, len(draft), kept, us))

    def _draft(self, decision: Decision) -> list[int]:
        if decision.arm == "cache":
            return list(decision.tokens)
        if decision.arm == "model" and self._drafter is not None and decision.room > 0:
            return list[int](self._drafter.draft(decision.room))
        return []

    def _accept(self, draft: list[int], read: Read) -> tuple[int, int]:
        if self._sampling is None:
            return accept_greedy(draft, read.logits.argmax(-1).tolist())
        probabilities = distribution(read.logits, self._sampling.temperature)
        return accept_sampled(draft, probabilities, self._generator)

    def _commit(self, tokens: list[int], verified: int, step_tokens: int) -> None:
        """Report to the router, and append the tokens up to the request's end."""
        length = len(self.prompt) + len(self.output) + len(tokens)
        self._report = self._router.report([self.name], [tokens], verified, length, step_tokens)
        self._router.observe(self._report)
        for token in tokens[: self.options.max_tokens - len(self.output)]:
            self.output.append(token)
            if token in self.options.stop_ids:
                self.finish = "stop"
                return
        if len(self.output) == self.options.max_tokens:
            self.finish = "length"
