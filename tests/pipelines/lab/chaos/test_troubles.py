"""A real broker, learner and stand-in worker, and a trouble of each kind."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.lab.chaos.run import make_trouble, staged
from pipelines.lab.chaos.standin import text_of
from pipelines.lab.chaos.troubles import PARTS, TAKEOVER_S, TROUBLES, Trouble
from pipelines.stack.running import TRACKING_VARIABLE

ALL = {trouble.name: trouble for trouble in TROUBLES}
HIT = (
    "disk full for the worker, broker away",
    "learner and worker ended",
    "checkpoint damaged, learner killed",
    "learner held back, a second one there",
    "broker and worker killed",
)


def test_every_part_and_pair_is_killed() -> None:
    killed = {t.kills for t in TROUBLES if t.name == f"{' and '.join(t.kills)} killed"}
    assert len(killed) == 10 and {part for names in killed for part in names} == {*PARTS}


@pytest.mark.long
@pytest.mark.stack
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_hit_comes_back_and_a_wrong_answer_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without a registry server, which takes a minute to start
    monkeypatch.setenv(TRACKING_VARIABLE, f"sqlite:///{tmp_path / 'mlflow.db'}")
    with staged(tmp_path / "stack", True, 1, Console(quiet=True)) as stage:
        for prompt, answer in zip(stage.asked, stage.answers, strict=True):
            assert answer == tuple(text_of(json.dumps(prompt.messages), len(answer)))
        done = [make_trouble(stage, ALL[name]) for name in HIT]
        assert [fault for each in done for fault in each["faults"]] == []
        assert all(each["requests"] > 0 for each in done)
        full, _, _, learners, killed = done
        assert full["events"]["lost"] > 0, "the disk was full in earnest"
        assert 0 < learners["back s"]["second learner"] < TAKEOVER_S
        assert killed["back s"].keys() == {"broker", "worker"}
        assert 0 < stage.audit.counts["counted"] <= stage.audit.counts["made"]
        stage.answers[:] = [tuple(reversed(answer)) for answer in stage.answers]
        wrong = make_trouble(stage, Trouble("nothing", lambda stage: nullcontext()))["faults"]
        assert wrong and all("a wrong answer" in fault for fault in wrong)
