"""Live scenarios: their files, and figures from what a stack has told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from decoder.contracts.errors import SettingsError
from decoder.contracts.trials import Block, Round
from pipelines.cli import app
from pipelines.drift import command
from pipelines.drift.live.figures import figures
from pipelines.drift.live.play import Played, asked
from pipelines.drift.live.scenario import SHIPPED, Live, Phase
from pipelines.drift.scenario import chosen

TWO = Live(
    name="two",
    phases=(
        Phase(workloads=("edits", "tools"), requests=5),
        Phase(workloads=("chat",), requests=4),
    ),
)


def rounds(draw: np.random.Generator, first: float, begin: float, n: int) -> list[str]:
    """One a second: the policy in force commits four tokens a plain step, the first ``first``."""
    made = []
    for number in range(n):
        blocks = []
        for side, rate in (("champion", 4.0), ("first", first), ("plain", 1.0)):
            us = 200_000.0 * float(draw.lognormal(0.0, 0.05))
            blocks.append(
                Block(side=side, steps=10, requests=1, tokens=round(10 * rate), us=us, cost_us=2e5)
            )
        made.append(
            Round(
                scope="s", worker="w", life="0a", number=number, time=begin + number, blocks=blocks
            ).model_dump_json()
        )
    return made


@pytest.fixture
def played() -> Played:
    draw = np.random.default_rng(0)
    told = [*rounds(draw, 4.0, 1_000.0, 60), *rounds(draw, 3.2, 1_060.0, 60)]
    answers = [1_000.0 + 13.0 * n for n in range(1, 10)]
    return Played([999.0, 1_059.5], answers, told, [1_090.0], [1_070.0])


def test_shipped_scenarios_are_two_and_their_prompts_repeat() -> None:
    shipped = chosen([], Live, SHIPPED)
    assert [each.name for each in shipped] == ["new-deployment", "text-changes"]
    for each in shipped:
        for phase in each.phases:
            made = asked(phase, 7)
            assert made == asked(phase, 7) != asked(phase, 8)
            assert len({p.id for p in made}) == phase.requests
            assert {p.workload for p in made} == set(phase.workloads)


def test_a_file_that_is_no_scenario_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rain.toml"
    for text, says in (
        ('[[phases]]\nworkloads = ["rain"]\nrequests = 3\n', "no workload 'rain'"),
        ('start = "never"\n', "start"),
        ("[[phases]\n", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=says):
            chosen([str(path)], Live, SHIPPED)
    with pytest.raises(SettingsError, match="no scenario 'agents-to-chat'"):
        chosen(["agents-to-chat"], Live, SHIPPED)


def test_rates_are_over_plain_decoding_by_window_with_intervals(played: Played) -> None:
    found = figures(TWO, 3, played)
    assert (found["name"], found["seed"], found["live"], found["requests"]) == ("two", 3, True, 9)
    policies = found["policies"]
    assert policies["adaptive"]["rate_before"] == pytest.approx(4.0, rel=0.02)
    assert policies["first"]["rate_after"] == pytest.approx(3.2, rel=0.02)
    assert policies["plain"]["rate"] == 1.0
    before, after = (found["ratios"]["adaptive/first"][w] for w in ("before", "after"))
    assert before[1] < 1.0 < before[2] and 1.0 < after[1] < 1.25 < after[2]
    assert found["ratios_by_cost"]["adaptive/first"]["after"][0] == pytest.approx(1.25)
    assert found["pairs"] == {"all": 120, "before": 60, "after": 60, "learned": 30}
    assert [change["at"] for change in found["changes"]] == [4]
    assert (found["alarms"], found["false_alarms"], found["promotions"]) == ([5], 0, [6])


def test_what_was_not_compared_has_no_rate(played: Played) -> None:
    found = figures(TWO, 1, Played(played.began, played.answered, [], played.learned, []))
    assert found["policies"]["adaptive"]["rate"] is None
    assert found["ratios"]["adaptive/first"]["all"][1:] == [None, None]
    json.dumps(found, allow_nan=False)


def test_what_was_played_is_not_played_again(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter([played])
    monkeypatch.setattr(command, "play", lambda *_: next(turns))
    asked_for = ["drift", "--live", "--scenario", "text-changes", "--seeds", "1"]
    asked_for += ["--out", str(tmp_path)]
    said = [CliRunner().invoke(app, [*asked_for, *more]).stdout for more in (("--json",), ())]
    found = json.loads(said[0])
    assert found["scenarios"][0]["live"] and json.loads((tmp_path / "live.json").read_text())
    assert "text-changes" in said[1] and "1.1" in said[1]


@pytest.mark.release
def test_a_small_scenario_is_played_through_the_whole_stack(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('[[phases]]\nworkloads = ["edits"]\nrequests = 6\n')
    done = CliRunner().invoke(
        app,
        ["drift", "--live", "--scenario", str(path), "--seeds", "1", "--out", str(tmp_path),
         "--json"],
        catch_exceptions=False,
    )  # fmt: skip
    (found,) = json.loads(done.stdout)["scenarios"]
    assert found["requests"] == 6 and found["pairs"]["all"] > 0
    assert found["policies"]["first"]["rate"] > 0.5
