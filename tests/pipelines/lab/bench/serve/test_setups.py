"""What the serving benchmark compares: how servers are started, and what a person may ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoder.contracts.errors import ModelError, SettingsError
from pipelines.cli import app
from pipelines.lab.bench.serve.setups import Setup, command, setups
from tests.pipelines.lab.bench.serve.served import HYBRID, NONE, OPTIONS, SUFFIX


def started(setup: Setup, **environment: str) -> tuple[list[str], dict[str, str]]:
    held = {"HVD_WORKER_ENABLED": "1", "HVD_WORKER_FLOOR": "1", "PATH": "/bin", **environment}
    return command(setup, OPTIONS, held, frozenset(), on_cpu=True, policy=Path("p"))


def test_servers_differ_in_speculation_alone() -> None:
    (ours, our_env), (plain, plain_env) = started(HYBRID), started(NONE)
    at = ours.index("--speculative-config")
    assert plain == ours[:at] + ours[at + 2 :]
    assert set(our_env.items()) - set(plain_env.items()) == {
        ("HVD_WORKER_ENABLED", "1"),
        ("HVD_WORKER_TELEMETRY", "false"),
        ("HVD_WORKER_HOLDOUT", "0"),
        ("HVD_WORKER_POLICY_FILE", str(Path("p").resolve())),
    }
    assert set(plain_env.items()) <= set(our_env.items())
    stock, stock_env = started(SUFFIX)
    assert stock[:at] + stock[at + 2 :] == plain and stock_env == plain_env
    assert json.loads(stock[at + 1]) == SUFFIX.speculative_config(None)
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    for setup in (NONE, HYBRID):
        assert runner.items() <= started(setup, **runner)[1].items(), "what a person chose stays"


def test_each_draft_length_is_a_setup_and_eagle3_runs_padded_and_not() -> None:
    made = setups(["hybrid", "eagle3", "suffix", "none"], [3, 5], [8], "head")
    assert [s.name for s in made] == [
        "none", "suffix-k8", "eagle3-k3", "eagle3-k3-unpadded", "eagle3-k5", "eagle3-k5-unpadded",
        "hybrid",
    ]  # fmt: skip
    padded, unpadded = (each.speculative_config("head") or {} for each in made[2:4])
    assert padded["num_speculative_tokens"] == 3 and padded["model"] == "head"
    assert {name for name in padded if padded[name] != unpadded[name]} == {
        "disable_padded_drafter_batch"
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--configs ngram", "no configuration ngram: choose from none, suffix, eagle3, hybrid"),
        ("--configs eagle3 --model owner/model", "name one with --drafter"),
        ("--concurrency 1,many", "--concurrency '1,many'"),
        ("--policy /nowhere/p.safetensors", "/nowhere/p.safetensors: no such file"),
        ("--check --dtype bfloat16", "give --dtype float32"),
        ("--check --dtype float32 --configs hybrid", "name none with --configs"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(arguments: str, words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments.split(" ")])
    assert isinstance(result.exception, SettingsError | ModelError)
    assert words in str(result.exception)
