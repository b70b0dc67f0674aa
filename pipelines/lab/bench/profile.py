"""The cost profile of the reference engine, measured as a worker measures its own at start."""

from __future__ import annotations

import logging
from typing import Final

import torch

from decoder.core import profiling
from decoder.core.costs import LiveCosts
from decoder.engines.reference.engine import ReferenceEngine
from pipelines.replay.method import Method

CONTEXT: Final = 64  # tokens of context before the timed steps
MOST: Final = 128  # tokens of the largest step
SECONDS: Final = 5.0
ATTEMPTS: Final = 3  # profiles to try until one is consistent

log = logging.getLogger(__name__)


def profile(engine: ReferenceEngine, method: Method) -> LiveCosts:
    """Time steps of the target, and of the method's drafter if it has one."""
    cache = engine.new_cache()
    with torch.inference_mode():
        read = engine.target.run([1] * CONTEXT, cache, last=True)

        def step(tokens: int) -> None:
            engine.target.run([1] * tokens, cache)
            cache.crop(-tokens)
            engine.clock()

        length = method.longest(engine.settings)
        arm = engine.drafter(length)

        def draft(_: int) -> None:
            assert arm is not None
            arm.draft(length)
            engine.clock()

        if arm is not None and read.aux is not None:
            arm.follow([1] * CONTEXT, read.aux)
            arm.catch_up()
        for _ in range(ATTEMPTS):
            measured = profiling.Profile("reference", most=MOST, drafted=length, seconds=SECONDS)
            measured.measure(step, draft if arm else None)
            if not (doubt := measured.doubt):
                break
            log.warning("a cost profile was discarded: %s", doubt)
        return measured.costs
