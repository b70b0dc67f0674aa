"""``hvd drift``: from a folder of recordings to figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from decoder.policy.first import first_policy
from learner.rows import Rows, from_events
from pipelines.cli import app
from pipelines.lab.drift import study
from pipelines.lab.drift.study import NAMES, resampled, stream
from tests.learner.traffic import Traffic
from tests.pipelines.lab.replay.samples import word_tokenizer, write_traces

SCENARIO = """
[[segments]]
kinds = ["chat"]
generations = 12
[[segments]]
kinds = ["edits"]
generations = 25
breaks = 6
"""


@pytest.fixture
def drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, on two files of sixty recordings in token ids and a scenario of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for seed, name in enumerate(("chat", "edits")):
        write_traces(tmp_path / "traces" / f"{name}.jsonl", seed, 60, 60)
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
    assert "small" in drift(policies="counting").stdout


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seeds": "-1"}, "give positive numbers"),
        ({"policies": "best"}, "no policy 'best'"),
        ({"traces": "."}, "name a folder of trace files"),
        ({"scenario": "numbered-records"}, "left out, no recordings of kind service"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    drift: Callable[..., Result], wrong: dict[str, Any], says: str
) -> None:
    found = drift(**wrong)
    assert found.exit_code
    assert says in str(found.exception)


# --- traffic that does not change


def sessions(seed: int, sign: int, n: int = 40) -> list[list[Rows]]:
    """Each of two requests of twenty drafts."""
    rows = from_events(Traffic(seed=seed, sign=sign).events(2 * n))
    cuts = [rows.take(np.arange(at, at + 20)) for at in range(0, len(rows), 20)]
    return [cuts[at : at + 2] for at in range(0, len(cuts), 2)]


def test_alarms_of_a_stream_are_those_of_the_scope_that_it_is_fed_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = stream("k", 1, sessions(1, 1), first_policy("drift"), 3_000, lambda *_: None)
    assert (calm["cache"], calm["model"]) == (0, 0) and 3_000 <= calm["rows"] < 3_020
    rows = iter([*islice(resampled(sessions(1, 1), np.random.default_rng(1)), 150),
                   *islice(resampled(sessions(2, -1), np.random.default_rng(1)), 151)])  # fmt: skip
    monkeypatch.setattr(study, "resampled", lambda *_: rows)
    turned = stream("k", 1, sessions(1, 1), first_policy("drift"), 6_000, lambda *_: None)
    assert turned["cache"] > 0


def test_the_command_counts_false_alarms_and_says_them_by_text(
    drift: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "LENGTH", 700)
    asked = {"scenario": None, "seeds": None}
    found = json.loads(drift("--false-alarms=2100", "--json", **asked).stdout)
    assert [(s["kind"], s["seed"]) for s in found["streams"]] == [
        ("agentic", 0), ("agentic", 1), ("chat", 0),
    ]  # fmt: skip
    assert found["rows"] == sum(each["rows"] for each in found["streams"]) >= 2_100
    assert "agentic" in drift("--false-alarms=700", **asked).stdout
