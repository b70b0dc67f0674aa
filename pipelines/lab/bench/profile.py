"""The cost profile of the reference engine, as a serving worker makes one at start."""

from __future__ import annotations

from typing import Final

import torch

from decoder.core import profiling
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.kv_cache import KVCache
from decoder.engines.reference.method import Method
from decoder.policy.pricing import CostTable

CONTEXT: Final = 64
"""Tokens of context that the timed steps stand behind."""
MOST: Final = 128
"""Tokens of the largest step: one request's, and its longest draft's."""
SECONDS: Final = 5.0


def profile(engine: ReferenceEngine, method: Method) -> CostTable:
    """Time steps of the target and of the method's drafter, if it has one."""
    cache = KVCache()
    with torch.inference_mode():
        read = engine.target.prefill([1] * CONTEXT, cache)

        def step(tokens: int) -> None:
            engine.target.verify(1, [1] * (tokens - 1), cache)
            cache.keep(CONTEXT)
            engine.clock()

        arm, length = engine.drafter(method), method.longest(engine.settings)

        def draft(_: int) -> None:
            assert arm is not None
            arm.draft(length)
            engine.clock()

        if arm is not None and read.aux is not None:
            arm.follow([1] * CONTEXT, read.aux)
            arm.catch_up()
        return profiling.profile(
            "reference", step, draft if arm else None, drafted=length, most=MOST, seconds=SECONDS
        )
