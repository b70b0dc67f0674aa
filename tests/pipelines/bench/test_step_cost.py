"""The timed step is an engine's: requests come, decode with drafts of both arms, and go."""

from __future__ import annotations

from pipelines.bench.step_cost import BATCH, measure


def test_a_whole_step_has_every_part_of_ours_in_it() -> None:
    whole = measure(steps=20, settled=5, long_prompts=1, long_steps=5)
    assert set(whole.us_by_verb) == {"observe", "choose", "drafted", "settle", "adapter"}
    assert all(us > 0.0 for us in whole.us_by_verb.values())
    assert whole.tokens_per_cycle > 1.2 and whole.steps == 20 and BATCH == 64
    assert whole.longest_wait_for_a_prompt_ms > 0.0
