"""Several ranks do the same in the same step, whatever befalls one of them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from decoder.engines.vllm.ranks import Plan, Ranks
from pipelines.machine import free_port
from tests.engines.plugged import real
from tests.engines.rank_jobs import ROWS
from tests.engines.two_heads import prompts, write_models

Rounds = list[list[Any]]


@dataclass(frozen=True)
class Ran:
    """What each of three ranks saw, by job; how it ended, and its log."""

    seen: list[dict[str, Any]]
    status: list[int]
    logs: list[str]

    def of(self, job: str) -> list[dict[str, Any]]:
        return [rank[job] for rank in self.seen]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder, size = tmp_path_factory.mktemp("jobs"), 3
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.rank_jobs", str(rank), str(size), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        logs = [rank.communicate(timeout=500)[0] for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return Ran(seen, [rank.returncode for rank in ranks], logs)


def test_all_ranks_follow_the_plan_of_the_first(ran: Ran) -> None:
    first, *rest = ran.of("agreeing")
    assert [rank["plans"] for rank in rest] == [first["plans"]] * 2
    assert first["plans"] == first["made"], "and it is what rank 0 decided"
    longest = max(sum(map(len, plan[0])) for plan in first["plans"])
    assert longest > 3 * 256, "also where a second message is needed"
    assert set(first["errors"]) == {"RuntimeError", "ValueError"}
    assert all(not rank["errors"] and not rank["made"] for rank in rest), "only rank 0 decides"


def test_rank_0_decides_which_steps_are_timed(ran: Ran) -> None:
    first, *rest = ran.of("conducting")
    assert ["step", 13] in first["ran"]
    assert first["results"] == ["measured", "no such size", "no clock", "measured"]
    for rank in rest:
        assert rank["ran"] == first["ran"] and rank["results"] == [None] * 4
    assert [rank["told"] for rank in (first, *rest)] == [[True, False]] * 3


def test_ranks_at_different_steps_end_their_processes(ran: Ran) -> None:
    assert all(ran.status) and "rank 0 is at (step, requests) (3, 1)" in ran.logs[2], ran.logs
    assert all("the ranks cannot reach each other" in log for log in ran.logs[:2])


def test_ranks_with_different_configurations_are_refused(ran: Ran) -> None:
    first, second, last = ran.of("meeting")
    for case in ("alike", "names of its own"):
        assert first[case] == second[case] == last[case] == ""
    for rank, told in enumerate((first, second)):
        assert told["settings"].startswith(
            f"rank 2 has HVD_WORKER_VARIANTS ['suffix'] where rank {rank} has HVD_WORKER_VARIANTS "
            "['plain']: install the same hybrid-verified-decoding on every node"
        )
        assert f"0.0.1 where rank {rank} has hybrid-verified-decoding 0.0.2" in told["version"]
        assert told["stock"].startswith("rank 2 runs without this plugin, ")
    assert last["settings"].startswith("rank 0 has HVD_WORKER_VARIANTS ['plain'] where rank 2 has")


def test_a_single_rank_broadcasts_nothing() -> None:
    ranks = Ranks()
    plan = Plan([[1, 2], []], [0, 3], 4)
    assert ranks.leads and ranks.agree(2, lambda: plan) is plan
    assert ranks.conduct(lambda step: [step(n) for n in (1, 2)], lambda n: n + 1) == [2, 3]
    assert ranks.broadcast(True) and not ranks.broadcast(False)


def test_a_row_proposes_its_cache_draft_or_its_share_of_the_model_draft() -> None:
    plan = Plan([[7, 8, 9], [], [], []], [0, 2, 0, 4], 4)
    made = np.arange(16).reshape(4, 4).tolist()
    assert plan.proposals(made) == [[7, 8, 9], [4, 5], [], [12, 13, 14, 15]]
    assert plan.proposals([[]] * 4) == plan.proposals([]) == [[7, 8, 9], [], [], []]
    assert Plan.nothing(ROWS).proposals([]) == [[]] * ROWS


ROUNDS = (
    ("swapping", [*range(8), *range(6)]),
    ("leader fails", [*range(8, 14), 0, 8]),
    ("swapping", [*range(14, 24), 1, 14, 2, 20, 3, 9, 15, 21]),
)
"""What befalls the ranks, and the prompts meanwhile; those that come again have cache drafts."""
SIDES = ("plain", "suffix", "model", "first")
"""Rules that take turns with the policies."""
DISTINCT = 24
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def decode(folder: Path, *job: Any, **asked: Any) -> tuple[Any, str]:
    """What a vLLM makes of the job of :func:`begun`, None if it ends before, and its log."""
    begun(folder, *job, **asked).wait()
    return made(folder)


def made(folder: Path) -> tuple[Any, str]:
    """What a process that ran in a folder has left there, None if it ended before, and its log."""
    result, log = folder / "result.json", (folder / "log").read_text()
    return (json.loads(result.read_text()) if result.exists() else None), log


def begun(
    folder: Path,
    models: tuple[Path, Path],
    ranks: int,
    rounds: Rounds,
    hybrid: bool,
    sides: bool = False,
    backend: str | None = None,
    there: Mapping[str, str] = MappingProxyType({}),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """A process that decodes the rounds."""
    folder.mkdir(exist_ok=True)
    job, result = folder / "job.json", folder / "result.json"
    drafter = str(models[1]) if hybrid else None
    job.write_text(
        json.dumps(
            {"model": str(models[0]), "drafter": drafter, "ranks": ranks, "rounds": rounds,
             "max_tokens": MAX_TOKENS, "backend": backend, "there": dict(there)}
        )
    )  # fmt: skip
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HVD_WORKER_ENABLED": "1" if hybrid else "0",
        # it goes by the clock: on a slow machine it kept the drafter from whole rounds
        "HVD_WORKER_FLOOR": "0", "HVD_WORKER_HOLDOUT": "0.9" if sides else "0",
        "HVD_WORKER_VARIANTS": ",".join(SIDES), "HVD_WORKER_METRICS": "0",
        "HVD_WORKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(r % 2) for r in range(ranks)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0", **variables,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.engines.rank_engine", str(job), str(result)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def two(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    rounds = [[name, [prompts(DISTINCT)[n] for n in numbers]] for name, numbers in ROUNDS]
    result, log = decode(tmp_path_factory.mktemp("two"), models, 2, rounds, hybrid=True)
    assert result is not None, log[-6000:]
    return result, log


@pytest.fixture(scope="module")
def plain(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[list[int]]]:
    """What plain vLLM writes on so many ranks, by prompt."""

    @functools.cache
    def written(ranks: int) -> list[list[int]]:
        folder, rounds = tmp_path_factory.mktemp("plain"), [["plain", prompts(DISTINCT)]]
        result, log = decode(folder, models, ranks, rounds, hybrid=False)
        assert result is not None, log[-6000:]
        return result["tokens"][0]  # type: ignore[no-any-return]

    return written


@real
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_ranks_write_what_plain_vllm_writes(two: Any, plain: Any, ranks: int) -> None:
    """Token for token in float32, policies swapping and rank 0 failing; plain on one, on two."""
    result, _ = two
    for (name, numbers), tokens in zip(ROUNDS, result["tokens"], strict=True):
        assert tokens == [plain(ranks)[n] for n in numbers], name


@real
def test_both_ranks_propose_the_same_in_the_same_step(two: Any) -> None:
    result, _ = two
    for (name, _), (first, second) in zip(ROUNDS, result["ranks"], strict=True):
        assert first["proposals"] == second["proposals"], name
        assert first["passes"] == second["passes"], (
            f"{name}: tokens of each of the drafter's passes"
        )
        assert len(first["proposals"]) > 10 and len(first["passes"]) > 3, name
    first = result["ranks"][0][0]
    assert first["versions"] > 9, "policies were swapped in mid-traffic"
    assert first["accepted"]["cache"] > 50 and first["cycles"]["model"] > 10, first
    lengths = {len(tokens) for _, drafts in first["proposals"] for tokens in drafts}
    assert max(lengths) > 20 and 0 in lengths


@real
def test_all_ranks_run_the_same_variant(
    models: tuple[Path, Path], plain: Any, tmp_path: Path
) -> None:
    asked = prompts(DISTINCT)
    rounds = [["swapping", asked], ["steady", asked * 2]]
    result, log = decode(tmp_path, models, 2, rounds, hybrid=True, sides=True)
    assert result is not None, log[-6000:]
    assert result["tokens"] == [plain(2), plain(2) * 2]
    for first, second in result["ranks"]:
        assert first["proposals"] == second["proposals"]
        assert first["passes"] == second["passes"] and first["faults"] == 0
    played = result["ranks"][-1][0]["sides"]
    assert set(played) == {"outside", "champion", *SIDES} and all(played.values()), played


@real
def test_only_rank_0_has_caches_policies_telemetry_and_log_lines(two: Any) -> None:
    result, log = two
    for first, second in result["ranks"]:
        assert (first["rank"], first["decides"]) == (0, True)
        assert (second["rank"], second["decides"], second["modules"]) == (1, False, [])
        assert "decoder.core.router" in first["modules"]
    assert sum(round_[0]["events"] for round_ in result["ranks"]) > 50
    said = [line for line in log.splitlines() if "hybrid verified decoding: scope" in line]
    assert len(said) == 1 and "Worker_TP0" in said[0], said


@real
def test_faults_of_ranks_are_counted_and_drafting_goes_on(two: Any) -> None:
    result, _ = two
    faults = [round_[0]["faults"] for round_ in result["ranks"]]
    for (name, _), count in zip(ROUNDS, faults, strict=True):
        assert count > 0 if "fail" in name else count == 0, (name, count)
    last = result["ranks"][-1][0]["proposals"]
    assert any(any(drafts) for _, drafts in last)


@real
def test_a_pass_that_fails_on_one_rank_ends_the_engine_at_once(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its collectives are half done: to go on would be to answer wrongly, to wait is for ever."""
    result, log = decode(tmp_path, models, 2, [["one breaks", prompts(8)]], hybrid=True)
    assert result is None
    assert "rank 1 of 2 ends, and the engine with it" in log, log[-6000:]
    assert "_greedy_sample fails" in log, "and why"
    assert "died unexpectedly" in log and "timed out" not in log.split("died unexpectedly")[1]


@real
@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"HVD_WORKER_ENABLED": "0"}, "rank 0 runs without this plugin, "),
        ({"HVD_WORKER_TENANTS": "client"}, "rank 0 has HVD_WORKER_TENANTS client where the proc"),
    ],
)
def test_an_engine_whose_ranks_lack_the_plugin_does_not_start(
    models: tuple[Path, Path], tmp_path: Path, there: dict[str, str], says: str
) -> None:
    """As under Ray, with nodes that lack the plugin or have variables of their own."""
    rounds = [["plain", prompts(1)]]
    result, log = decode(tmp_path, models, 1, rounds, hybrid=True, backend="mp", there=there)
    assert result is None and says in log, log[-6000:]


@real
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({}, ""),
        ({"HVD_WORKER_ENABLED": "0"}, "rank 1 runs without this plugin, "),
        ({"HVD_WORKER_HOLDOUT": "0.5"}, "rank 1 has HVD_WORKER_HOLDOUT 0.5 where rank 0 has"),
    ],
)
def test_ranks_of_an_external_launcher_are_compared(
    models: tuple[Path, Path], plain: Any, tmp_path: Path, other: dict[str, str], says: str
) -> None:
    """As torchrun starts them: each with an engine of its own."""
    asked, port, folders = prompts(6), str(free_port()), (tmp_path / "0", tmp_path / "1")
    both = [
        begun(
            folder, models, 2, [["swapping", asked]], hybrid=True, backend="external_launcher",
            variables={
                "RANK": folder.name, "LOCAL_RANK": folder.name, "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                **(other if folder.name == "1" else {}),
            },
        )
        for folder in folders
    ]  # fmt: skip
    try:
        both[0].wait()
        if not says:
            both[1].wait()
    finally:
        for rank in both:  # a stock rank waits for the first until somebody ends it
            rank.kill()
            rank.wait()
    (first, log), (second, log_there) = map(made, folders)
    if says:
        assert first is None and says in log, log[-6000:]
        return
    assert first is not None and second is not None, log[-3000:] + log_there[-3000:]
    assert first["tokens"] == second["tokens"] == [plain(1)[: len(asked)]]
    drafts, drafts_there = (
        [row for _, row in result["ranks"][0][0]["proposals"]] for result in (first, second)
    )
    assert drafts == drafts_there and any(any(row) for row in drafts)
