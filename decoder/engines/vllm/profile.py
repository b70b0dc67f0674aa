"""The cost profile of a vLLM worker: steps of several sizes, timed once at start.

A step is timed as vLLM's own dummy run plus the logits of all its tokens, and drafting a token as
the drafter's, plus the choice of one for each request; what that leaves out (attention over a long
context, sampling, scheduling) is added by the corrections of every step served.
"""

from __future__ import annotations

import platform
from typing import Any, Final

import torch

from decoder import costs
from decoder.engines.vllm.ranks import Ranks
from decoder.policy.pricing import CostTable

MANY: Final = 16
"""Requests that drafting is timed for, beside one."""


def setup_name(runner: Any, scope: str) -> str:
    """What a profile is valid for: models, precision, engine settings and device."""
    device = platform.processor() or platform.machine()
    if runner.device.type != "cpu":
        device = str(torch.get_device_module(runner.device).get_device_name())
    config = runner.vllm_config
    eager = config.model_config.enforce_eager
    threads = torch.get_num_threads()
    return f"{scope}/{device}/{threads}/{config.model_config.dtype}/{'eager' if eager else 'graph'}"


def profile(runner: Any, scope: str, ranks: Ranks) -> CostTable | None:
    """Time target and drafter apart; None on ranks that follow. Nothing is mutated that lasts."""

    def wait() -> None:
        if runner.device.type != "cpu":
            torch.accelerator.synchronize()

    def step(tokens: int) -> None:
        hidden, _ = runner._dummy_run(tokens, is_graph_capturing=True)
        runner.model.compute_logits(hidden[:tokens])
        wait()

    name, most = setup_name(runner, scope), runner.max_num_tokens
    drafter: Any = getattr(runner, "drafter", None)
    if not hasattr(drafter, "dummy_run"):
        return ranks.conduct(lambda target: costs.profile(name, target, most=most), step)
    alone = drafter.dummy_run

    def draft(rows: int) -> None:
        alone(rows, is_graph_capturing=True)  # one pass, as for a graph capture
        drafter._greedy_sample(drafter.hidden_states[:rows])
        wait()

    drafter.dummy_run = lambda *_, **__: None  # or vLLM's own dummy run would include it
    try:
        rows = (1, min(MANY, most))
        return ranks.conduct(
            lambda target, drafting: costs.profile(name, target, drafting, rows=rows, most=most),
            step, draft,
        )  # fmt: skip
    finally:
        del drafter.dummy_run
