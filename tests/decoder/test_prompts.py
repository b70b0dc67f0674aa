"""A prompt is indexed in steps, and only where it can be copied from."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.core.requests import Committed, RequestOptions
from decoder.drafting.suffix import STEP_TOKENS
from tests.decoder.simulated import Router


def following(prompt: np.ndarray, options: RequestOptions) -> tuple[Router, int]:
    """A router that has begun a request, and the bytes of what it holds for drafts by then."""
    router = Router()
    router.start("r", prompt, options)
    return router, router.cache.held_bytes


def test_beginning_a_request_indexes_nothing_of_it() -> None:
    long = np.arange(128_000, dtype=np.int32)
    options = RequestOptions(100, 1 << 20)
    router, held = following(long, options)
    assert held == following(long[:3], options)[1]
    steps = 0
    while router.cache.waiting:
        router.choose(["r"])
        steps += 1
    assert steps == -(-len(long) // STEP_TOKENS)


@pytest.mark.parametrize(
    "options",
    [RequestOptions(1, 1 << 20), RequestOptions(100, 1 << 20, speculate=False),
     RequestOptions(100, 8_001)],
)  # fmt: skip
def test_the_prompt_of_a_request_that_can_have_no_draft_is_not_indexed(
    options: RequestOptions,
) -> None:
    router, held = following(np.tile(np.arange(400, dtype=np.int32), 20), options)
    assert [d.arm for d in router.choose(["r"])] == ["none"] and not router.kept.events
    assert not router.cache.waiting and router.cache.held_bytes == held
    later = RequestOptions(9, 1 << 20, min_tokens=1)
    assert following(np.arange(8_000, dtype=np.int32), later)[0].cache.waiting


def test_text_that_an_engine_writes_over_later_stays_what_it_was() -> None:
    row = np.tile(np.arange(2, 30, dtype=np.int32), 3)
    router, _ = following(row, RequestOptions(100, 1 << 20))
    row[:] = 1
    router.observe([Committed("r", [2], 0)], len(row))
    router.choose(["r"])
    router.observe([Committed("r", [3], 0)], 1)
    (decision,) = router.choose(["r"])
    assert list(decision.tokens)[:4] == [4, 5, 6, 7]
