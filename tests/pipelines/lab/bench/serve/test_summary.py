"""Figures of requests and sessions, by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decoder.contracts.errors import ModelError, SettingsError
from pipelines.cli import app
from pipelines.lab.bench.metrics import table
from pipelines.lab.bench.serve.load import Reply
from pipelines.lab.bench.serve.setups import Setup, command, setups
from pipelines.lab.bench.serve.summary import (
    WIDTH,
    Level,
    ServerRun,
    figures,
    paired,
    summarise,
    table_columns,
)
from tests.pipelines.lab.bench.serve import served
from tests.pipelines.lab.bench.serve.served import EAGLE3, HYBRID, NONE, OPTIONS, SUFFIX

LOOP = tuple(range(32)) * 2


def reply(session: str, turn: int, seconds: float, tokens: tuple[int, ...] = (1, 2)) -> Reply:
    """Its first token comes after half its seconds, the next one at its end."""
    return Reply(session, seconds / 2, seconds, tokens, "", turn, (seconds / 2,))


def level(*replies: Reply, cpu_s: float = 4.0) -> Level:
    return served.level(*replies, wall_s=sum(r.latency_s for r in replies), cpu_s=cpu_s)


def run(setup: Setup, number: int, seconds: float) -> ServerRun:
    measured = level(reply("d:a", 0, seconds), reply("d:b", 0, seconds), cpu_s=seconds)
    return ServerRun(number, setup.name, (measured,))


def test_first_turns_are_told_apart_from_warm_ones() -> None:
    rounds = {0: level(reply("d:a", 0, 4.0), reply("d:a", 1, 2.0), reply("d:b", 0, 6.0))}
    first, warm = figures(rounds, "first"), figures(rounds, "warm")
    assert (first["answers"], first["ttft_p50_s"], first["tok_per_s_each"]) == (2, 2.5, 0.4)
    assert (warm["answers"], warm["ttft_p50_s"], warm["tok_per_s_each"]) == (1, 1.0, 1.0)
    assert warm["ms_per_token_p50"] == warm["gap_ms_p99"] == 1000
    assert first["gap_ms_p99"] == pytest.approx(2990), "of gaps of 2 and 3 seconds"


def test_ratios_pair_sessions_and_leave_out_what_only_one_side_answered_and_loops() -> None:
    mine = {0: level(reply("d:a", 0, 1.0), reply("d:a", 1, 1.0), reply("d:b", 0, 2.0))}
    failed = Reply("d:a", 0.1, 0.1, (), "HTTP 400", turn=1)
    theirs = {0: level(reply("d:a", 0, 2.0), failed, reply("d:b", 0, 2.0))}
    found = paired(mine, theirs, "all")
    assert (found["sessions"], found["ratio"]) == (2, pytest.approx((4 / 3) / (4 / 4)))
    assert found["interval"] == pytest.approx([1.0, 2.0]), "either session alone"
    assert paired(mine, theirs, "warm") == {"ratio": None, "interval": None, "sessions": 0}
    # rounds of one session are one thing to resample
    one, other = ({r: level(reply("d:a", 0, s + r)) for r in range(5)} for s in (1.0, 2.0))
    found = paired(one, other, "all")
    assert (found["sessions"], found["interval"]) == (1, None)
    looping = {0: level(reply("d:a", 0, 1.0, LOOP), reply("d:a", 1, 1.0))}
    straight = {0: level(reply("d:a", 0, 9.0), reply("d:a", 1, 2.0))}
    assert paired(looping, straight, "straight")["ratio"] == pytest.approx(2.0)


def test_each_is_held_to_the_best_of_every_other_method() -> None:
    slow = Setup("suffix-k64", "suffix", 64)
    took = {NONE: 8.0, SUFFIX: 4.0, slow: 5.0, EAGLE3: 6.0, HYBRID: 2.0}
    # the second round's machine is half as fast
    runs = [run(setup, n, seconds * (1 + n)) for n in range(2) for setup, seconds in took.items()]
    records = {r["configuration"]: r for r in summarise(runs, list(took))}
    to = records["hybrid"]["against"]
    best = {"none": "none", "suffix": "suffix-k8", "eagle3": "eagle3-k3"}
    assert {m: t["configuration"] for m, t in to.items()} == best
    assert [to[m]["all"]["ratio"] for m in best] == pytest.approx([4, 2, 3])
    assert to["suffix"]["cpu"] == {"ratio": 2.0, "range": [2.0, 2.0], "rounds": 2}
    assert "suffix" not in records["suffix-k8"]["against"]
    expected = {
        "sessions": 4, "answers": 4, "tokens": 8, "tok_per_s": (4 / 4.0 + 4 / 8.0) / 2,
        "mean_accepted": 0.5, "cycles_per_1k": 750,
        "prompt_tokens_cached_share": 0.25,
    }  # fmt: skip
    assert {k: records["hybrid"][k] for k in expected} == pytest.approx(expected)
    json.dumps([*records.values()], allow_nan=False)
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(table("", table_columns([*records.values()]), [*records.values()]))
    told = console.file.getvalue()
    assert "suffix-k8 *" in told and "2.00 (2.00-2.00)" in told
    assert "/eagle3" in told and "/hybrid" not in told and "…" not in told


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
    v2 = setups(["eagle3-adaptive", "eagle3-v2"], [3], [8], "head")
    assert [s.name for s in v2] == ["eagle3-v2-k3", "eagle3-v2-k3-sync", "eagle3-adaptive-k3"]
    for each, scheduled in zip(v2, ("--async", "--no-async", "--async"), strict=True):
        arguments, environment = started(each)
        assert f"{scheduled}-scheduling" in arguments
        assert (
            environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
            and "HVD_WORKER_ENABLED" not in environment
        )
        config = json.loads(arguments[arguments.index("--speculative-config") + 1])
        assert config["method"] == "eagle3"
        assert config.get("enable_adaptive_verification", False) is ("adaptive" in each.name)
    padded, unpadded = (each.speculative_config("head") or {} for each in made[2:4])
    assert padded["num_speculative_tokens"] == 3 and padded["model"] == "head"
    assert {name for name in padded if padded[name] != unpadded[name]} == {
        "disable_padded_drafter_batch"
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--configs ngram", "no configuration ngram: choose from none, suffix, eagle3, eagle3-v2"),
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
