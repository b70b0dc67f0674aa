"""``hvd drift``: from a folder of recordings to figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from decoder.contracts.bundle import Policy
from decoder.contracts.features import FEATURES
from decoder.policy.estimate import predict
from decoder.policy.first import first_policy
from decoder.settings import WorkerSettings
from pipelines.cli import app
from pipelines.lab.drift import measure
from pipelines.lab.drift.columns import NAMES, PAPER_FEATURES, Columns
from pipelines.lab.drift.scenario import Scenario, Segment
from pipelines.lab.drift.stream import Worker
from pipelines.lab.drift.traffic import Library
from tests.pipelines.lab.replay.samples import copying_traces, token_classes, word_tokenizer

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
def drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, on two files of sixty recordings in token ids and a scenario of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "traces").mkdir()
    for seed, name in enumerate(("one", "two")):
        lines = [
            json.dumps({"session": f"{name}{i}", "prompt": t.prompt, "output": t.output})
            for i, t in enumerate(copying_traces(seed, 60, 60))
        ]
        (tmp_path / "traces" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "small.toml").write_text(SCENARIO, encoding="utf-8")
    given = {
        "--tokenizer": tmp_path / "tokenizer", "--traces": tmp_path / "traces",
        "--scenario": tmp_path / "small.toml", "--seeds": 1,
    }  # fmt: skip

    def ran(*flags: str, **more: Any) -> Result:
        options = given | {f"--{name}": value for name, value in more.items()}
        asked = [str(w) for pair in options.items() if pair[1] is not None for w in pair]
        return CliRunner().invoke(app, ["drift", *asked, *flags])

    return ran


def test_every_policy_is_measured(drift: Callable[..., Result]) -> None:
    summary = json.loads(drift("--json").stdout)
    (found,) = summary["scenarios"]
    assert list(found["policies"]) == list(NAMES)
    for figure in found["policies"].values():
        assert figure["rate"] > 0
        assert 0.2 < figure["oracle_fraction"] <= 1.01
    assert found["requests"] == 37
    assert found["changes"][0]["what"] == ["kinds", "breaks"]
    assert found["false_alarms"] >= 0
    assert measure.table(summary).row_count == 1
    assert "small" in drift(policies="counting").stdout


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seeds": "-1"}, "not negative"),
        ({"policies": "best"}, "no policy 'best'"),
        ({"traces": None}, "name a folder with --traces, or make some"),
        ({"scenario": "agents-to-chat"}, "left out, no recordings of kind agentic"),
        ({"first": "gone"}, "cannot be read"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    drift: Callable[..., Result], wrong: dict[str, Any], says: str
) -> None:
    found = drift(**wrong)
    assert found.exit_code
    assert says in str(found.exception)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Policy, Worker]]:
    each = Scenario(
        name="test",
        segments=(Segment(kinds=("one",), generations=20), Segment(kinds=("two",), generations=20)),
    )
    sets = {"one": copying_traces(1, 80), "two": copying_traces(2, 80)}
    library = Library(sets, token_classes(), 4)
    columns = Columns(each, library, 1, WorkerSettings(), first_policy("drift"))
    return {name: columns.column(name) for name in NAMES if name != "oracle"}


def test_each_column_is_made_and_served_as_it_says(made: dict[str, tuple[Policy, Worker]]) -> None:
    policies = {name: policy for name, (policy, _) in made.items()}
    assert {n for n, (_, worker) in made.items() if not worker.adapts} == {"paper"}
    assert (policies["paper"].kind, policies["paper"].threshold) == ("payoff", 6.0)
    assert made["paper"][1].settings.suffix_max_factor == 1.0
    assert policies["counting"].kind == "frequency"
    assert policies["adaptive"] is policies["first"]
    assert {policies[n].kind for n in ("frozen", "refit")} == {"survival"}


def test_what_the_paper_has_no_feature_for_it_does_not_see(
    made: dict[str, tuple[Policy, Worker]],
) -> None:
    policy = made["paper"][0]
    features = np.random.default_rng(0).random((50, len(FEATURES))).astype(np.float32) * 5
    features[:, FEATURES.index("draft_len")] = 8
    other = features.copy()
    for index, feature in enumerate(FEATURES):
        if feature not in PAPER_FEATURES:
            other[:, index] += 3.0
    np.testing.assert_array_equal(predict(policy, features), predict(policy, other))
    other[:, FEATURES.index("score")] += 3.0
    assert (predict(policy, features) != predict(policy, other)).any()
