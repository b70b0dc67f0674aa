"""A real broker, learner and stand-in worker, and a trouble of each kind."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.chaos.run import faults_of, make_trouble, record, scene
from pipelines.chaos.standin import text_of
from pipelines.chaos.troubles import PARTS, TAKEOVER_S, Trouble, troubles
from pipelines.stack.running import TRACKING_VARIABLE

HIT = (
    "broker and worker killed",
    "checkpoint damaged, learner killed",
    "disk full for the worker, broker away",
    "spill damaged, worker killed",
    "two learners, the first one held back",
)
ALL = {trouble.name: trouble for trouble in troubles(None, 5.0)}


def test_every_part_and_pair_is_killed_and_heals_name_parts() -> None:
    killed = [name for name in ALL if name.endswith("killed") and "," not in name]
    assert len(killed) == 10
    assert all({*trouble.heals, *trouble.kills} <= {*PARTS} for trouble in ALL.values())


@pytest.mark.long
@pytest.mark.stack
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_hit_comes_back_and_a_wrong_answer_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without a registry server, which takes a minute to start
    monkeypatch.setenv(TRACKING_VARIABLE, f"sqlite:///{tmp_path / 'mlflow.db'}")
    with scene(tmp_path / "stack", True, Console(quiet=True)) as made:
        for prompt, answer in zip(made.asked, made.answers, strict=True):
            assert answer == tuple(text_of(json.dumps(prompt.messages), len(answer)))
        done = [make_trouble(made, ALL[name], random.Random(1)) for name in HIT]
        found = record(done, made.heard, 1, True)
        assert faults_of(found) == [] and all(i.requests > 0 for i in done)
        _, _, full, spill, learners = done
        assert full.account.lost > 0, "the disk was full in earnest"
        assert spill.figures["left in files"] > 0
        assert 0 < learners.figures["lease taken over in s"] < TAKEOVER_S
        assert done[0].back_s.keys() == {"broker", "worker"}
        assert 0 < found["events"]["counted"] <= found["events"]["made"]
        spoilt = [tuple(reversed(answer)) for answer in made.answers]
        blind = replace(made, answers=spoilt)
        nothing = Trouble("nothing", lambda stage, draw: stage.wait(1.0), ())
        wrong = make_trouble(blind, nothing, random.Random(1)).faults
        assert wrong and all("a wrong answer" in fault for fault in wrong)
