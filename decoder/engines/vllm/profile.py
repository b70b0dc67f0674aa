"""The cost profile of a vLLM worker: steps of several sizes, timed at start.

The sizes reach up to the largest decoding step (each request with its longest draft, within the
engine's batch limit and the memory for logits). Where the engine has CUDA graphs, their sizes are
used. A step is timed as vLLM's dummy run plus the logits of all tokens; drafting a token as the
drafter's dummy run plus sampling for each request. Attention over long contexts, sampling and
scheduling are left out; corrections from served steps add them.
"""

from __future__ import annotations

import logging
import platform
import time
from typing import Any, Final

import torch

from decoder.core.costs import LiveCosts
from decoder.core.guards.draft_budget import tokens_of_logits
from decoder.core.profiling import SECONDS, Profile
from decoder.engines.vllm.ranks import Ranks
from decoder.engines.vllm.requirements import longest_draft

log = logging.getLogger(__name__)

CPU_SECONDS: Final = 6.0
"""Time for a profile on a CPU, where steps of many tokens never pay."""
ATTEMPTS: Final = 3
"""Profiles taken until one is plausible: other parts of a service start at the same time."""
MANY: Final = 16
"""Drafting is timed for one request and for this many."""


def profile(runner: Any, scope: str, ranks: Ranks) -> LiveCosts | None:
    """Time steps, again where the times are implausible; None on ranks that follow.

    Raises:
        Exception: on the leading rank, raised by a step; no further one is timed.
    """
    for _ in range(ATTEMPTS):
        steps, doubt = empty_profile(runner, scope), ""
        try:
            time_steps(runner, steps, ranks)
            if ranks.leads and (doubt := steps.doubt):
                log.warning("step times are implausible: %s", doubt)
        finally:
            again = ranks.broadcast(bool(doubt))
        if not again:
            break
    if not ranks.leads:
        return None
    if steps.doubt:
        log.warning("the default cost model is used, and corrected by served steps")
    each = zip(steps.table.tokens, steps.table.verify_us, strict=True)
    log.info("a step costs, in ms by tokens: %s", {n: round(us / 1e3, 1) for n, us in each})
    return steps.costs


def empty_profile(runner: Any, scope: str) -> Profile:
    """A profile of a runner, without times."""
    on_cpu, config = runner.device.type == "cpu", runner.vllm_config
    model, graphs = config.model_config, runner.compilation_config
    # tokens of the largest step that only decodes
    longest = runner.scheduler_config.max_num_seqs * (1 + longest_draft(config))
    most = min(longest, runner.max_num_tokens, tokens_of_logits(model.get_vocab_size()))
    captures = not on_cpu and graphs.cudagraph_mode
    sizes = sorted(set(graphs.cudagraph_capture_sizes or ())) if captures else []
    device = platform.processor() or platform.machine()
    if not on_cpu:
        device = str(torch.get_device_module(runner.device).get_device_name())
    mode = "eager" if model.enforce_eager else "graph"
    suffix, v2 = config.speculative_config.method == "suffix", config.use_v2_model_runner
    return Profile(
        # the setup that it is valid for
        f"{scope}/{device}/{torch.get_num_threads()}/{model.dtype}/{mode}",
        most=most,
        graphs=[size for size in sizes if size <= runner.max_num_tokens],
        rows=(1,) if suffix else (1, min(MANY, most)),
        drafted=runner.speculator.num_speculative_steps if v2 and not suffix else 1,
        seconds=CPU_SECONDS if on_cpu else SECONDS,
    )


def time_steps(runner: Any, steps: Profile, ranks: Ranks) -> None:
    """Time target and drafter separately, into ``steps`` of the leading rank."""
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

    if runner.vllm_config.speculative_config.method == "suffix":
        ranks.conduct(steps.measure, step)
        return
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
        ranks.conduct(steps.measure, step, draft)
    finally:
        delattr(drafter, method)
