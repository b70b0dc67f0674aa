"""In float32 the hybrid writes token for token what plain vLLM does, policies swapping beneath, or
sides deciding by turns."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.embedded import DRAFTER, ensure_model
from pipelines.workloads import WORKLOADS, prompts
from tests.engines.plugged import run_apart

pytestmark = [pytest.mark.engine, pytest.mark.long]

KINDS = WORKLOADS
EACH = 5
MAX_TOKENS = 64


def decode(
    folder: Path, name: str, hybrid: bool, sides: dict[str, str] | None = None
) -> dict[str, Any]:
    """Decode the workloads in a process of its own and return what came out."""
    speculative = None
    if hybrid:
        speculative = {
            "method": "eagle3",
            "model": str(DRAFTER),
            "num_speculative_tokens": 64,
            "disable_padded_drafter_batch": True,
            "disable_eagle_block_drop": True,
        }
    asked = [p for kind in KINDS for p in itertools.islice(prompts(kind), EACH)]
    job = {
        "model": str(ensure_model()),
        "prompts": [list(p.messages) for p in asked],
        "extra_args": [{"hvd_workload": p.dataset} for p in asked],
        "max_tokens": MAX_TOKENS,
        "max_model_len": 1024,
        "speculative_config": speculative,
        "swap": hybrid and sides is None,
    }
    job_file, result_file = folder / f"{name}.job.json", folder / f"{name}.json"
    job_file.write_text(json.dumps(job))
    # by the clock the floor may put one arm in force for long
    decisive = {"HVD_WORKER_FLOOR": "0"} if sides is None else sides
    switched = {"HVD_WORKER_ENABLED": str(int(hybrid))}
    files = str(job_file), str(result_file)
    run_apart("tests.engines.beside_plain", *files, **switched, **decisive)
    return json.loads(result_file.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return decode(tmp_path_factory.mktemp("plain"), "plain", hybrid=False)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return decode(tmp_path_factory.mktemp("hybrid"), "hybrid", hybrid=True)


@pytest.fixture(scope="module")
def by_turns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sides = {"HVD_WORKER_HOLDOUT": "0.9", "HVD_WORKER_SIDES": "plain,suffix,model,first"}
    return decode(tmp_path_factory.mktemp("turns"), "turns", hybrid=True, sides=sides)


def same(plain: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(plain["tokens"]) == EACH * len(KINDS) >= 20
    for index, (expected, got) in enumerate(zip(plain["tokens"], other["tokens"], strict=True)):
        assert got == expected, f"prompt {index} differs"


def test_output_equals_plain_vllm_token_for_token(
    plain: dict[str, Any], hybrid: dict[str, Any]
) -> None:
    same(plain, hybrid)


def test_output_is_the_same_while_sides_alternate_every_few_steps(
    plain: dict[str, Any], by_turns: dict[str, Any]
) -> None:
    same(plain, by_turns)
    status = by_turns["status"]
    assert status["faults"] == 0 and not status["sides_failed"]
    sides = status["sides"]
    assert set(sides) == {"outside", "champion", "plain", "suffix", "model", "first"}
    assert status["rounds_made"] > 1 and all(side["us"] > 0 for side in sides.values())
    booked = sum(side["tokens"] for side in sides.values())
    made = sum(status["cycles"].values())
    assert made <= booked <= status["tokens"], "each cycle's tokens once, and no prompt's first"


def test_every_arm_was_really_used_and_policies_really_swapped(hybrid: dict[str, Any]) -> None:
    status = hybrid["status"]
    assert status["faults"] == 0
    assert all(status["cycles"].get(arm, 0) > 10 for arm in ("cache", "model")), status["cycles"]
    assert all(status["accepted"].get(arm, 0) > 5 for arm in ("cache", "model")), status["accepted"]
    assert len({event["policy_version"] for event in hybrid["events"]}) > 20
    assert status["tokens"] == sum(len(tokens) for tokens in hybrid["tokens"])


def test_every_request_is_accounted_for(hybrid: dict[str, Any]) -> None:
    status = hybrid["status"]
    assert status["requests_started"] == status["requests_stopped"] == len(hybrid["tokens"])
    assert status["drafts_labelled"] == len(hybrid["events"]) > 200
    verified = [e for e in hybrid["events"] if e["label"] == "verified"]
    assert verified and all(e["arm"] == "cache" for e in verified)
    for event in hybrid["events"]:
        assert 0 <= event["accepted"] <= event["draft_len"]
        assert event["workload"] in KINDS
