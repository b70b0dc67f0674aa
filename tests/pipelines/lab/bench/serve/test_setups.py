"""What the serving benchmark compares: how servers are started, and what a person may ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoder.contracts.errors import ModelError, SettingsError
from pipelines.cli import app
from pipelines.lab.bench.serve.setups import Setup, command, setups, variants
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
        ("VLLM_USE_V2_MODEL_RUNNER", "0"),
    }
    assert set(plain_env.items()) <= set(our_env.items())
    stock, stock_env = started(SUFFIX)
    assert stock[:at] + stock[at + 2 :] == plain and stock_env == plain_env
    assert json.loads(stock[at + 1]) == SUFFIX.speculative_config(None)
    runner = "VLLM_USE_V2_MODEL_RUNNER"
    assert started(NONE, **{runner: "1"})[1][runner] == "1", "what the person chose stays"


def test_each_draft_length_is_a_setup_eagle3_runs_padded_and_not_and_variants_change_settings() -> (
    None
):
    asked = variants(["short:HVD_WORKER_FLOOR=0, HVD_WORKER_SUFFIX_MAX_FACTOR=6"])
    made = setups(["hybrid", "eagle3", "suffix", "none"], [3, 5], [8], "head", asked)
    assert [s.name for s in made] == [
        "none", "suffix-k8", "eagle3-k3", "eagle3-k3-unpadded", "eagle3-k5", "eagle3-k5-unpadded",
        "hybrid", "short",
    ]  # fmt: skip
    padded, unpadded = (each.speculative_config("head") or {} for each in made[2:4])
    assert padded["num_speculative_tokens"] == 3 and padded["model"] == "head"
    assert {name for name in padded if padded[name] != unpadded[name]} == {
        "disable_padded_drafter_batch"
    }
    (ours, our_env), (varied, env) = started(HYBRID), started(made[-1])
    changed = {"HVD_WORKER_FLOOR": "0", "HVD_WORKER_SUFFIX_MAX_FACTOR": "6"}
    assert varied == ours and env == our_env | changed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--variant short", "NAME:HVD_WORKER_...=VALUE"),
        ("--variant hybrid:HVD_WORKER_FLOOR=1", "'hybrid' names another"),
        ("--variant off:HVD_WORKER_ENABLED=0", "are the same in every server"),
        ("--variant sides:HVD_WORKER_SIDES=plain,suffix", "in no value"),
        ("--variant short:HVD_WORKER_FLOORS=1", "HVD_WORKER_FLOORS is not valid"),
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
