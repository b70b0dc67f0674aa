"""The cost profile of a vLLM worker: steps of several sizes, timed once at start.

A step is timed as vLLM's own dummy run plus the logits of all its tokens; what it leaves out
(attention over a long context, sampling, scheduling) is added by the corrections of every step
served. The drafter's own passes are only seen in service.
"""

from __future__ import annotations

import platform
import time
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
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(ROUNDS + 1):  # the first round pays for allocations
        for n in sizes:
            began = time.perf_counter()
            # As for a graph capture: one pass of the drafter, and not one for each draft token.
            hidden, _ = runner._dummy_run(n, is_graph_capturing=True)
            runner.model.compute_logits(hidden[:n])
            if runner.device.type != "cpu":
                torch.accelerator.synchronize()
            times[n].append((time.perf_counter() - began) * 1e6)
    measured = tuple(median(times[n][1:]) for n in sizes)
    return CostTable(setup_name(runner, scope), tuple(sizes), measured)
