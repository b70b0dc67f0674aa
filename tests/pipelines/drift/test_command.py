"""``hvd drift``: from a folder of recordings to figures, and on from where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from decoder.contracts.errors import ModelError, SettingsError, TraceError
from decoder.contracts.features import FEATURES
from decoder.policy.estimate import predict
from decoder.settings import WorkerSettings
from pipelines.drift import command, study
from pipelines.drift.columns import LEARNS, NAMES, PAPER_FEATURES, Column, Columns
from pipelines.drift.scenario import Scenario, Segment
from pipelines.drift.traffic import Library
from tests.pipelines.replay.samples import copying_traces, token_classes, word_tokenizer

TOKENIZER = word_tokenizer()
SILENT = Console(quiet=True)
SCENARIO = """
[[segments]]
kinds = ["one"]
generations = 12
[[segments]]
kinds = ["two"]
generations = 25
breaks = 6
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., command.Options]:
    """Two files of eighty recordings in token ids, and a scenario of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "traces").mkdir()
    for seed, name in enumerate(("one", "two")):
        lines = [
            json.dumps({"session": f"{name}{i}", "prompt": t.prompt, "output": t.output})
            for i, t in enumerate(copying_traces(seed, 80, 70))
        ]
        (tmp_path / "traces" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "small.toml").write_text(SCENARIO, encoding="utf-8")

    def made(**more: Any) -> command.Options:
        given = {
            "traces": tmp_path / "traces",
            "scenarios": [str(tmp_path / "small.toml")],
            "seeds": "1",
            "policies": "",
            "scale": 1.0,
            "out": tmp_path / "out",
            "resume": True,
        }
        return command.Options(**{**given, **more})

    return made


def drift(asked: command.Options) -> dict[str, Any]:
    return command.run(asked, TOKENIZER, command.first_policy(None), SILENT)


def test_every_policy_is_measured_and_written_down(
    options: Callable[..., command.Options],
) -> None:
    asked = options()
    summary = drift(asked)
    (found,) = summary["scenarios"]
    assert list(found["policies"]) == list(NAMES)
    for figure in found["policies"].values():
        assert figure["rate"] > 0
        assert 0.2 < figure["oracle_fraction"] <= 1.01
    assert found["requests"] == 37
    assert found["changes"][0]["what"] == ["kinds", "breaks"]
    assert found["false_alarms"] >= 0
    held = json.loads((asked.out / "results.json").read_text())
    assert held["scenarios"] == summary["scenarios"]
    assert command.outcome(summary).row_count == 1


def test_what_is_done_is_not_done_again(
    options: Callable[..., command.Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(policies="counting,first")
    before = drift(asked)
    size = (asked.out / "runs.jsonl").stat().st_size

    def interrupted(name: str, *rest: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "ran", interrupted)
    assert drift(asked) == before
    with pytest.raises(KeyboardInterrupt):
        drift(options(policies="counting,first,oracle"))
    assert (asked.out / "runs.jsonl").stat().st_size == size
    with pytest.raises(KeyboardInterrupt):
        drift(options(policies="counting,first", seeds="1,2"))
    kept = json.loads((asked.out / "results.json").read_text())["scenarios"]
    assert kept == before["scenarios"]


def test_a_recording_added_makes_another_study(
    options: Callable[..., command.Options],
) -> None:
    asked = options(policies="counting")
    drift(asked)
    with (asked.traces / "one.jsonl").open("a") as file:  # type: ignore[operator]
        file.write('\n{"session": "new", "prompt": [1, 2], "output": [3, 4]}')
    drift(asked)
    assert len((asked.out / "runs.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seeds": "1,x"}, "--seeds '1,x'"),
        ({"seeds": "-1"}, "not negative"),
        ({"policies": "best"}, "no policy 'best'"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(
    options: Callable[..., command.Options], wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        drift(options(**wrong))


def test_recordings_that_are_not_there_are_told(
    options: Callable[..., command.Options], tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match="no trace files"):
        drift(options(traces=tmp_path / "nowhere"))
    with pytest.raises(TraceError, match="name a folder with --traces, or make some"):
        drift(options(traces=None))
    with pytest.raises(TraceError, match="left out, no recordings of kind agentic"):
        drift(options(scenarios=["agents-to-chat"]))
    with pytest.raises(ModelError, match="cannot be read"):
        command.first_of(tmp_path / "gone")


@pytest.fixture(scope="module")
def made() -> dict[str, Column]:
    each = Scenario(
        name="test",
        segments=(Segment(kinds=("one",), generations=20), Segment(kinds=("two",), generations=20)),
    )
    sets = {"one": copying_traces(1, 80), "two": copying_traces(2, 80)}
    library = Library(sets, token_classes(), 4)
    columns = Columns(each, library, 1, WorkerSettings(), command.first_policy(None))
    return {name: columns.column(name) for name in NAMES if name != "oracle"}


def test_each_column_is_made_and_served_as_it_says(made: dict[str, Column]) -> None:
    assert {n for n, c in made.items() if c.learns} == {LEARNS}
    assert {n for n, c in made.items() if not c.worker.adapts} == {"paper"}
    assert made["paper"].policy.kind == "payoff"
    assert made["paper"].policy.threshold == 6.0
    assert made["paper"].worker.settings.suffix_max_factor == 1.0
    assert made["counting"].policy.kind == "frequency"
    assert made["adaptive"].policy is made["first"].policy
    assert {made[n].policy.kind for n in ("frozen", "refit")} == {"survival"}


def test_what_the_paper_has_no_feature_for_it_does_not_see(made: dict[str, Column]) -> None:
    policy = made["paper"].policy
    features = np.random.default_rng(0).random((50, len(FEATURES))).astype(np.float32) * 5
    features[:, FEATURES.index("draft_len")] = 8
    other = features.copy()
    for index, feature in enumerate(FEATURES):
        if feature not in PAPER_FEATURES:
            other[:, index] += 3.0
    np.testing.assert_array_equal(predict(policy, features), predict(policy, other))
    other[:, FEATURES.index("score")] += 3.0
    assert (predict(policy, features) != predict(policy, other)).any()
