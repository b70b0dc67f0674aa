"""A profile that is in doubt is taken again between requests, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.plugged import real, run_apart
from tests.engines.two_heads import write_models


@real
def test_an_incomplete_profile_is_repeated_while_the_engine_is_idle(
    tmp_path: Path,
) -> None:
    target, drafter = write_models(tmp_path)
    drafts: dict[str, Any] = {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": 16,
    }
    job: dict[str, Any] = {"model": str(target), "max_model_len": 256, "prompt": [5, 6, 7, 8] * 6}
    drafts["disable_padded_drafter_batch"] = True
    told = run_apart(
        "tests.engines.profiled",
        tmp_path,
        job | {"speculative_config": drafts},
        HVD_WORKER_ENABLED="1",
    )
    first, *again = told["timed"]
    assert first == 1 and again and max(again) > 4 and not told["faults"]
    held = told["held"]
    assert held[0]["doubted"] and not held[-1]["doubted"], "believed in the end, or given up"
    assert all(each["tokens"] == held[0]["tokens"] and each["plain_us"] > 1.0 for each in held)
