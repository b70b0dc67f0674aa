"""What plain vLLM writes is written, whatever of a request vLLM judges by a length or a state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.plugged import run_apart

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]

UNDRAFTED = {"thinking_token_budget"}
KINDS = (
    "min_tokens", "stop strings", "max_tokens", "bad_words", "allowed_token_ids",
    "repetition_detection", "penalties", "structured", "thinking_token_budget",
)  # fmt: skip


def served(folder: Path, hybrid: bool) -> dict[str, Any]:
    """All answers of an engine in a process of its own."""
    result = folder / "result.json"
    switched = {"HVD_WORKER_ENABLED": str(int(hybrid))}
    decisive = {"HVD_WORKER_HOLDOUT": "0", "HVD_WORKER_FLOOR": "0"}
    run_apart("tests.engines.judged", str(result), **switched, **decisive)
    return json.loads(result.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return served(tmp_path_factory.mktemp("plain"), hybrid=False)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return served(tmp_path_factory.mktemp("hybrid"), hybrid=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_plain_vllms(kind: str, plain: dict[str, Any], hybrid: dict[str, Any]) -> None:
    mine, theirs = hybrid["answers"][kind], plain["answers"][kind]
    wrong = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
    assert not wrong, f"{len(wrong)} of {len(mine)}: {wrong[:3]}"
    assert kind in UNDRAFTED or hybrid["drafted"][kind] > 20


def test_all_kinds_were_asked_for_and_none_was_a_fault(
    plain: dict[str, Any], hybrid: dict[str, Any]
) -> None:
    assert set(KINDS) == set(plain["answers"]) == set(hybrid["answers"])
    assert hybrid["faults"] == 0


def test_probabilities_of_named_tokens_are_refused_in_one_sentence(hybrid: dict[str, Any]) -> None:
    assert "logprob_token_ids" in hybrid["refused"]
