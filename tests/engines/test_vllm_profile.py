"""A profile that is implausible is taken again before the engine serves, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.plugged import real, run_apart
from tests.engines.two_heads import write_models


@real
def test_an_implausible_profile_is_taken_again_three_times_at_most(tmp_path: Path) -> None:
    target, drafter = write_models(tmp_path)
    drafts = {
        "method": "eagle3", "model": str(drafter), "num_speculative_tokens": 16,
        "disable_padded_drafter_batch": True,
    }  # fmt: skip
    made: list[dict[str, Any]] = []
    for enough in (1, 9):
        job = {"model": str(target), "max_model_len": 256, "prompt": [5, 6, 7, 8] * 6}
        job |= {"speculative_config": drafts, "enough": enough}
        made.append(run_apart("tests.engines.profiled", tmp_path, job, HVD_WORKER_ENABLED="1"))
    believed, given_up = made
    assert believed["timed"][0] == 1 and max(believed["timed"][1:]) > 4
    assert given_up["timed"] == [1, 1, 1]
    assert believed["tokens"] == given_up["tokens"]
    assert all(each["plain_us"] > 1.0 and not each["faults"] for each in made)
