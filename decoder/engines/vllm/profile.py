"""The cost profile of a vLLM worker: steps of several sizes, timed once at start.

The sizes go to the largest step that decoding makes (each request with its longest draft, as far as
the engine batches so many tokens and their logits have room), at the sizes of the engine's own
graphs where it has any. A step is timed as vLLM's own dummy run plus the logits of all its tokens,
and drafting a token as the drafter's, plus the choice of one for each request; what that leaves out
(attention over a long context, sampling, scheduling) is added by the corrections of every step
served.
"""

from __future__ import annotations

import platform
from functools import partial
from typing import Any, Final

import torch

from decoder.core import profiling
from decoder.core.guards.draft_budget import tokens_of_logits
from decoder.engines.vllm.ranks import Ranks
from decoder.engines.vllm.requirements import longest_draft
from decoder.policy.pricing import CostTable

CPU_SECONDS: Final = 6.0
"""What a profile may take of a start without an accelerator: steps of many tokens never pay there.
"""
MANY: Final = 16
"""Requests that drafting is timed for, beside one."""


def profile(runner: Any, scope: str, ranks: Ranks) -> CostTable | None:
    """Time target and drafter apart; None on ranks that follow. Nothing is mutated that lasts."""
    on_cpu, config = runner.device.type == "cpu", runner.vllm_config
    v2, model = config.use_v2_model_runner, config.model_config
    device = platform.processor() or platform.machine()
    if not on_cpu:
        device = str(torch.get_device_module(runner.device).get_device_name())

    def wait() -> None:
        if not on_cpu:
            torch.accelerator.synchronize()

    def step(tokens: int) -> None:
        # One token is never a draft: timed as it will run, on a full graph where there is one.
        plain = tokens == 1 and not v2
        hidden, _ = runner._dummy_run(tokens, uniform_decode=plain, is_graph_capturing=True)
        runner.model.compute_logits(hidden[:tokens])
        wait()

    how = "eager" if model.enforce_eager else "graph"
    # what a profile is valid for
    name = f"{scope}/{device}/{torch.get_num_threads()}/{model.dtype}/{how}"
    seconds, most = CPU_SECONDS if on_cpu else profiling.SECONDS, largest_step(runner)
    timed = partial(profiling.profile, name, most=most, graphs=graphs(runner), seconds=seconds)
    if config.speculative_config.method == "suffix":
        return ranks.conduct(partial(timed, rows=(1,)), step)
    # vLLM's own dummy run would include it
    drafter, run = (runner.speculator, "propose") if v2 else (runner.drafter, "dummy_run")
    alone, given = getattr(drafter, run), dict[int, Any]()

    def draft(rows: int) -> None:
        if not v2:
            alone(rows, is_graph_capturing=True)  # one pass, as for a graph capture
            drafter._greedy_sample(drafter.hidden_states[:rows])
        else:
            if rows not in given:
                drafter.propose = lambda **arguments: given.update({rows: arguments})
                runner._dummy_run(rows)
            alone(**given[rows])
        wait()

    setattr(drafter, run, lambda *_, **__: None)
    try:
        drafted = drafter.num_speculative_steps if v2 else 1
        rows = (1, min(MANY, most))
        return ranks.conduct(partial(timed, rows=rows, drafted=drafted), step, draft)
    finally:
        delattr(drafter, run)


def graphs(runner: Any) -> tuple[int, ...]:
    """Sizes that a step is padded to, ascending; none where the engine captures no graphs."""
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
