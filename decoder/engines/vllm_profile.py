"""The cost profile of a vLLM worker: steps of several sizes, timed once at start.

A step is timed as vLLM's own dummy run plus the logits of all its tokens, and the drafter as one
pass for each token it drafts; what that leaves out (attention over a long context, sampling,
scheduling) is added by the corrections of every step served.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch

from decoder.contracts.costs import CostTable

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
ROUNDS: Final = 3


def setup_name(runner: Any, scope: str) -> str:
    """What a profile is valid for: models, precision, engine settings and device."""
    device = platform.processor() or platform.machine()
    if runner.device.type != "cpu":
        device = str(torch.get_device_module(runner.device).get_device_name())
    config = runner.vllm_config
    eager = config.model_config.enforce_eager
    threads = torch.get_num_threads()
    return f"{scope}/{device}/{threads}/{config.model_config.dtype}/{'eager' if eager else 'graph'}"


def profile(runner: Any, scope: str) -> CostTable:
    """Time steps of ``SIZES`` tokens, sizes interleaved so that a slow moment is shared."""
    sizes = [n for n in SIZES if n <= runner.max_num_tokens]
    target: dict[int, list[float]] = {n: [] for n in sizes}
    passes: list[float] = []

    def step(n: int) -> None:
        hidden, _ = runner._dummy_run(n, is_graph_capturing=True)
        runner.model.compute_logits(hidden[:n])

    def timed(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        if runner.device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - began) * 1e6

    drafter = runner.drafter if hasattr(runner.drafter, "dummy_run") else None
    alone = None if drafter is None else drafter.dummy_run
    if drafter is not None:  # vLLM's dummy run would include it
        drafter.dummy_run = lambda *_, **__: None
    try:
        for _ in range(ROUNDS + 1):  # the first round pays for allocations
            for n in sizes:
                target[n].append(timed(lambda n=n: step(n)))  # type: ignore[misc]
            if alone is not None:
                # As for a graph capture: one pass, and not one for each draft token.
                passes.append(timed(lambda: alone(1, is_graph_capturing=True)))
    finally:
        if drafter is not None:
            del drafter.dummy_run
    return CostTable(
        setup_name(runner, scope),
        tuple(sizes),
        tuple(median(target[n][1:]) for n in sizes),
        draft_token_us=median(passes[1:]) if passes else 0.0,
    )
