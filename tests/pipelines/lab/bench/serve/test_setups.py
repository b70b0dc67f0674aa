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


def test_each_draft_length_is_a_setup_and_eagle3_runs_padded_and_not() -> None:
    made = setups(["hybrid", "eagle3", "suffix", "none"], [3, 5], [8], "head")
    assert [s.name for s in made] == [
        "none", "suffix-k8", "eagle3-k3", "eagle3-k3-unpadded", "eagle3-k5", "eagle3-k5-unpadded",
        "hybrid",
    ]  # fmt: skip


def test_stock_servers_get_vllms_own_configuration() -> None:
    suffix = Setup("suffix-k64", "suffix", 64).speculative_config(None)
    assert suffix == {
        "method": "suffix", "num_speculative_tokens": 64, "suffix_decoding_max_tree_depth": 64,
    }  # fmt: skip
    for padded in (True, False):
        config = Setup("e", "eagle3", 3, padded).speculative_config("head")
        assert config == {
            "method": "eagle3", "model": "head", "num_speculative_tokens": 3,
            "disable_padded_drafter_batch": not padded, "disable_eagle_block_drop": True,
        }  # fmt: skip
    assert NONE.speculative_config("head") is None


def test_servers_differ_in_speculation_alone() -> None:
    environment = {"HVD_WORKER_ENABLED": "1", "PATH": "/bin"}

    def started(setup: Setup) -> tuple[list[str], dict[str, str]]:
        return command(setup, OPTIONS, environment, frozenset(), on_cpu=True, policy=Path("p"))

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
    assert stock[:at] + stock[at + 2 :] == plain
    assert json.loads(stock[at + 1]) == SUFFIX.speculative_config(None)
    assert stock_env == plain_env
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    assert started(NONE)[1]["VLLM_USE_V2_MODEL_RUNNER"] == "1", "what the person chose stays"


def test_a_variant_is_the_hybrid_with_other_settings() -> None:
    asked = variants(["short:HVD_WORKER_FLOOR=0, HVD_WORKER_SUFFIX_MAX_FACTOR=6"])
    made = setups(["none", "hybrid"], [3], [8], "head", asked)
    assert [s.name for s in made] == ["none", "hybrid", "short"]
    environment = {"HVD_WORKER_FLOOR": "1", "PATH": "/bin"}
    ours, our_env = command(HYBRID, OPTIONS, environment, frozenset(), on_cpu=True)
    varied, env = command(made[-1], OPTIONS, environment, frozenset(), on_cpu=True)
    assert varied == ours
    changed = {"HVD_WORKER_FLOOR": "0", "HVD_WORKER_SUFFIX_MAX_FACTOR": "6"}
    assert env == our_env | changed


VARIANT = "NAME:HVD_WORKER_...=VALUE"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--variant short", VARIANT),
        ("--variant a/b:HVD_WORKER_FLOOR=1", VARIANT),
        ("--variant hybrid:HVD_WORKER_FLOOR=1", "'hybrid' names another"),
        ("--variant a-name-that-is-too-long:HVD_WORKER_FLOOR=1", "at most 16 letters"),
        ("--variant off:HVD_WORKER_ENABLED=0", "are the same in every server"),
        ("--variant sides:HVD_WORKER_SIDES=plain,suffix", "in no value"),
        ("--variant short:HVD_WORKER_FLOORS=1", "HVD_WORKER_FLOORS is not valid"),
        ("--variant short:HVD_WORKER_FLOOR=perhaps", "HVD_WORKER_FLOOR is not valid"),
        ("--configs ngram", "no configuration ngram: choose from none, suffix, eagle3, hybrid"),
        ("--configs ,", "no configuration was named"),
        ("--names toolz", "toolz: choose from"),
        ("--configs eagle3 --model owner/model", "name one with --drafter"),
        ("--concurrency 1,many", "--concurrency '1,many'"),
        ("--eagle3-k 0", "--eagle3-k '0'"),
        ("--policy /nowhere/p.safetensors", "/nowhere/p.safetensors: no such file"),
        ("--check --dtype bfloat16", "give --dtype float32"),
        ("--check --dtype float32 --configs hybrid", "name none with --configs"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(arguments: str, words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments.split(" ")])
    assert isinstance(result.exception, SettingsError | ModelError)
    assert words in str(result.exception)
