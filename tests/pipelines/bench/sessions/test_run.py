"""Whole benchmarks of sessions, against server processes that talk like vLLM (``fake_vllm``)."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decoder.contracts.errors import SettingsError
from pipelines.bench.serve import run as bench
from pipelines.bench.serve.passes import Journal
from pipelines.bench.serve.plan import Plan
from pipelines.bench.serve.report import unequal
from pipelines.bench.serve.setups import Setup
from tests.pipelines.bench.serve.served import HYBRID, NONE, OPTIONS, asked
from tests.pipelines.bench.serve.test_run import launching
from tests.pipelines.bench.sessions.test_scripts import script


def plan(*compared: Setup) -> Plan:
    sessions = (
        (script("s", "1234", ">not sent", "12"),),
        (script("t", "1"), script("u", "12345", ">not sent", "the second of these is long")),
    )
    return Plan(compared, OPTIONS, (1, 2), sessions, (asked("w"),), 6, by_turns=True)


def measured(plan: Plan, out: Path, habits: dict[str, str], started: list[str]) -> dict[str, Any]:
    console = Console(file=io.StringIO(), width=200)
    return bench.run(plan, out, console, launching(habits, started))


def replies(plan: Plan, out: Path, level: int) -> list[tuple[str, int, int, bool]]:
    """Session, turn, first token and whether it failed; the first token is the context's length."""
    (run, *_) = Journal(out.with_suffix(".runs.jsonl"), plan.setting()).read()
    return [
        (r.prompt, r.turn, r.tokens[0] if r.tokens else 0, bool(r.error))
        for r in run.levels[level].replies
    ]


def test_what_the_server_said_stands_in_the_next_turns_context(tmp_path: Path) -> None:
    out, asks = tmp_path / "s.json", plan(NONE, HYBRID)
    made = measured(asks, out, {}, [])
    assert replies(asks, out, 0) == [("d:s", 0, 4, False), ("d:s", 1, 4 + len("xxx") + 2, False)]
    assert made == json.loads(out.read_text())
    assert made["benchmark"] == "sessions"
    assert unequal(made) == []
    lone = made["records"][0]
    assert (lone["sessions"], lone["answers"], lone["tokens"], lone["failed"]) == (1, 2, 12, 0)
    assert lone["groups"]["warm"]["answers"] == 1
    assert lone["mean_accepted"] == 1.0


def test_a_session_ends_with_the_turn_that_fails_and_the_others_go_on(tmp_path: Path) -> None:
    out, asks = tmp_path / "s.json", plan(NONE)
    made = measured(asks, out, {"none": "refuse-long"}, [])
    assert replies(asks, out, 1) == [
        ("d:t", 0, 1, False), ("d:u", 0, 5, False), ("d:u", 1, 0, True),
    ]  # fmt: skip
    assert [(r["answers"], r["failed"]) for r in made["records"]] == [(2, 0), (2, 1)]


def test_an_answer_that_differs_is_named_and_what_follows_it_is_not_compared(
    tmp_path: Path,
) -> None:
    made = measured(plan(NONE, HYBRID), tmp_path / "s.json", {"hybrid": "differ"}, [])
    assert unequal(made) == [
        "hybrid at 1: only 0 of 1 answers equal those of 'none' token for token.",
        "hybrid at 2: only 0 of 2 answers equal those of 'none' token for token.",
    ]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    started: list[str] = []
    out, asks = tmp_path / "s.json", plan(NONE, HYBRID)
    with pytest.raises(KeyboardInterrupt):
        measured(asks, out, {"hybrid": "interrupt"}, started)
    assert {r["configuration"] for r in json.loads(out.read_text())["records"]} == {"none"}
    made = measured(asks, out, {}, started)
    assert started == ["none", "hybrid", "hybrid"]
    assert {r["configuration"] for r in made["records"]} == {"none", "hybrid"}


def test_sessions_of_other_lengths_are_not_mixed(tmp_path: Path) -> None:
    out, asks = tmp_path / "s.json", plan(NONE)
    measured(asks, out, {}, [])
    one_turn = tuple(tuple(script(p.id, "1") for p in level) for level in asks.prompts)
    with pytest.raises(SettingsError, match=r"prompts differ.*--json"):
        measured(replace(asks, prompts=one_turn), out, {}, [])
