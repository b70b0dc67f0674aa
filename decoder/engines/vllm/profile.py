"""The cost profile of a vLLM worker: steps of several sizes, timed at start.

The sizes reach up to the largest decoding step (each request with its longest draft, within the
engine's batch limit and the memory for logits). Where the engine has CUDA graphs, their sizes are
used. A step is timed as vLLM's dummy run plus the logits of all tokens; drafting a token as the
drafter's dummy run plus sampling for each request. Attention over long contexts, sampling and
scheduling are left out; corrections from served steps add them. A doubtful profile is repeated
while the engine is idle.
"""

from __future__ import annotations

import logging
import platform
import time
from functools import partial
from typing import Any, Final

import torch

from decoder.core.costs import LiveCosts
from decoder.core.guards.draft_budget import tokens_of_logits
from decoder.core.profiling import SECONDS, Profile
from decoder.engines.vllm.ranks import Ranks
from decoder.engines.vllm.requirements import longest_draft

log = logging.getLogger(__name__)

CPU_SECONDS: Final = 6.0
"""Time for a profile at start on a CPU, where steps of many tokens never pay."""
IDLE_SECONDS: Final = 0.25
"""Time slice of a repeated profile, for which a new request may have to wait."""
PROFILE_EVERY: Final = 20
"""Least time between two slices, in slices: requests wait for a twentieth of it at most."""
ATTEMPTS: Final = 3
"""Most repetitions of a doubtful profile."""
MANY: Final = 16
"""Drafting is timed for one request and for this many."""


NO_PROFILE: Final = "steps cannot be profiled: costs are learned from service alone"


class WorkerProfile:
    """The profile of one runner, in ``steps`` on the leading rank. ``doubted``, the same on all
    ranks: whether profiling must continue."""

    def __init__(self, runner: Any, scope: str, ranks: Ranks) -> None:
        """An empty profile."""
        self.doubted = False
        self._runner, self._scope, self._ranks = runner, scope, ranks
        self.steps, self._repetitions = empty_profile(runner, scope), 0
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Whether the next slice may be timed, as the leading rank decides."""
        return self._ranks.broadcast(time.monotonic() >= self._due_at)

    def take(self, seconds: float | None = None) -> LiveCosts | None:
        """Time steps for ``seconds``, or for the whole budget at start. Mutates only the profile.

        Returns:
            new costs, on the leading rank; None where there are none.

        Raises:
            Exception: on the leading rank, raised by a step; no further one is timed.
        """
        doubted = False
        try:
            complete = time_steps(self._runner, self.steps, self._ranks, seconds)
            if not self._ranks.leads:
                return None
            if seconds is not None and not complete:
                doubted = True
                return None
            steps, doubt = self.steps, self.steps.doubt
            if doubt:
                doubted = self._repetitions < ATTEMPTS
                self.steps = empty_profile(self._runner, self._scope)
                self._repetitions += 1
                log.warning(
                    "step times are implausible (%s): the default cost model is used %s", doubt,
                    "until steps are timed again while the engine is idle" if doubted
                    else "and corrected by served steps",
                )  # fmt: skip
                if seconds is not None:
                    return None
            each = zip(steps.table.tokens, steps.table.verify_us, strict=True)
            log.info("a step costs, in ms by tokens: %s", {n: round(us / 1e3, 1) for n, us in each})
            return steps.costs
        finally:
            self._due_at = time.monotonic() + PROFILE_EVERY * (seconds or 0.0)
            self.doubted = self._ranks.broadcast(doubted)


def empty_profile(runner: Any, scope: str) -> Profile:
    """A profile of a runner, without times."""
    on_cpu, config = runner.device.type == "cpu", runner.vllm_config
    model, most = config.model_config, largest_step(runner)
    device = platform.processor() or platform.machine()
    if not on_cpu:
        device = str(torch.get_device_module(runner.device).get_device_name())
    mode = "eager" if model.enforce_eager else "graph"
    suffix, v2 = config.speculative_config.method == "suffix", config.use_v2_model_runner
    return Profile(
        # the setup that it is valid for
        f"{scope}/{device}/{torch.get_num_threads()}/{model.dtype}/{mode}",
        most=most,
        graphs=graphs(runner),
        rows=(1,) if suffix else (1, min(MANY, most)),
        drafted=runner.speculator.num_speculative_steps if v2 and not suffix else 1,
        seconds=CPU_SECONDS if on_cpu else SECONDS,
    )


def time_steps(runner: Any, steps: Profile, ranks: Ranks, seconds: float | None) -> bool | None:
    """Time target and drafter separately, into ``steps``; whether it is complete, None on ranks
    that follow."""
    v2 = runner.vllm_config.use_v2_model_runner

    def wait() -> None:
        if runner.device.type != "cpu":
            torch.accelerator.synchronize()

    def step(tokens: int) -> None:
        # A step of one token has no draft: it runs on a full graph where there is one.
        plain = tokens == 1 and not v2
        hidden, _ = runner._dummy_run(tokens, uniform_decode=plain, is_graph_capturing=True)
        runner.model.compute_logits(hidden[:tokens])
        wait()

    measure = partial(steps.take, seconds=seconds)
    if runner.vllm_config.speculative_config.method == "suffix":
        return ranks.conduct(measure, step)
    # vLLM's dummy run includes the drafter: it is replaced meanwhile
    drafter, method = (runner.speculator, "propose") if v2 else (runner.drafter, "dummy_run")
    run, given = getattr(drafter, method), dict[str, Any]()

    def draft(rows: int) -> float:
        if v2:  # its arguments are buffers that the next run of the target overwrites
            drafter.propose = lambda **arguments: given.update(arguments)
            runner._dummy_run(rows)
            wait()
        began = time.perf_counter()
        if v2:
            run(**given)
        else:
            run(rows, is_graph_capturing=True)  # one pass, as for a graph capture
            drafter._greedy_sample(drafter.hidden_states[:rows])
        wait()
        return time.perf_counter() - began

    setattr(drafter, method, lambda *_, **__: None)
    try:
        return ranks.conduct(measure, step, draft)
    finally:
        delattr(drafter, method)


def graphs(runner: Any) -> tuple[int, ...]:
    """Sizes that steps are padded to, ascending; none where the engine captures no graphs."""
    config = runner.compilation_config
    if runner.device.type == "cpu" or not config.cudagraph_mode:
        return ()
    captured = sorted(set(config.cudagraph_capture_sizes or ()))
    return tuple(size for size in captured if size <= runner.max_num_tokens)


def largest_step(runner: Any) -> int:
    """Tokens of the largest step that only decodes."""
    longest = runner.scheduler_config.max_num_seqs * (1 + longest_draft(runner.vllm_config))
    logits = tokens_of_logits(runner.model_config.get_vocab_size())
    return int(min(longest, runner.max_num_tokens, logits))
