"""Several ranks do the same in the same step, whatever befalls one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.engines.vllm.plan import Plan
from decoder.engines.vllm.ranks import Ranks
from tests.engines.rank_jobs import ROWS


def run(job: str, size: int, folder: Path) -> tuple[list[int], list[str]]:
    """Exit status and log of each rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.rank_jobs", job, str(r), str(size), str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r in range(size)
    ]  # fmt: skip
    logs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], logs


def seen(job: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank saw of a job that none may fail."""
    status, logs = run(job, size, folder)
    assert status == [0] * size, "\n".join(logs)[-4000:]
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(size)]


def test_all_ranks_follow_the_plan_of_the_first(tmp_path: Path) -> None:
    first, *rest = seen("agreeing", 3, tmp_path)
    assert [rank["plans"] for rank in rest] == [first["plans"]] * 2
    assert first["plans"] == first["made"], "and it is what rank 0 decided"
    longest = max(sum(map(len, plan[0])) for plan in first["plans"])
    assert longest > 3 * 256, "also where a second message is needed"
    assert set(first["errors"]) == {"RuntimeError", "ValueError"}
    assert all(not rank["errors"] and not rank["made"] for rank in rest), "only rank 0 decides"


def test_a_rank_that_fails_before_a_pass_holds_all_back_and_none_up(tmp_path: Path) -> None:
    first, *rest = seen("drafting", 3, tmp_path)
    for passes in first["sizes"]:
        assert len(set(passes)) == 1, "every rank reads the same tokens in the same pass"
    assert len(first["sizes"]) > 60
    for rank in rest:
        assert rank["sizes"] == first["sizes"]
        assert rank["widths"] == first["widths"], "and drafts as many tokens"
        assert rank["unread"][-1] == first["unread"][-1] == 0
        assert rank["unread"] != first["unread"], "though one had dropped what the others had not"
    assert min(rank["failed"] for rank in (first, *rest)) > 20


def test_the_clock_of_rank_0_decides_what_is_timed(tmp_path: Path) -> None:
    first, second = seen("conducting", 2, tmp_path)
    assert first["ran"] == second["ran"] and ["step", 13] in first["ran"]
    assert first["results"] == ["measured", "no such size", "no clock", "measured"]
    assert second["results"] == [None] * 4


@pytest.mark.parametrize(
    ("job", "why"),
    [("breaking", "failed inside a pass"), ("astray", "rank 0 is at (step, requests) (3, 1)")],
)
def test_ranks_that_cannot_agree_end_instead_of_answering(
    tmp_path: Path, job: str, why: str
) -> None:
    status, logs = run(job, 2, tmp_path)
    assert all(status), f"one went on: {status}"
    assert why in "".join(logs) or "not at the pass" in "".join(logs), logs
    assert not list(tmp_path.glob("*.json"))


def test_a_lone_rank_talks_to_nobody() -> None:
    ranks = Ranks()
    plan = Plan(((1, 2), ()), (0, 3), 4)
    assert ranks.leads and ranks.agree(2, lambda: plan) is plan
    assert ranks.together(True, ranks.passing(lambda: "drafts")) == "drafts"
    assert ranks.conduct(lambda step: [step(n) for n in (1, 2)], lambda n: n + 1) == [2, 3]
    ranks.fell_out()
    with pytest.raises(ZeroDivisionError):
        ranks.together(True, lambda: 1 // 0)


def test_a_row_takes_what_is_given_or_its_share_of_the_model_draft() -> None:
    plan = Plan(((7, 8, 9), (), (), ()), (0, 2, 0, 4), 4)
    made = np.arange(16).reshape(4, 4).tolist()
    assert plan.proposals(made) == [[7, 8, 9], [4, 5], [], [12, 13, 14, 15]]
    assert plan.proposals([[]] * 4) == plan.proposals([]) == [[7, 8, 9], [], [], []]
    assert Plan.nothing(ROWS).proposals([]) == [[]] * ROWS
