"""Whole serving benchmarks, against server processes that talk like vLLM (``fake_vllm``)."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decoder.contracts.errors import ProcessError, SettingsError
from pipelines import progress
from pipelines.bench.serve import run as bench
from pipelines.bench.serve.passes import Journal, ServerRun
from pipelines.bench.serve.plan import Plan
from pipelines.bench.serve.report import unequal
from pipelines.bench.serve.setups import Setup
from pipelines.stack import processes
from tests.pipelines.bench.serve.served import HYBRID, NONE, OPTIONS, SUFFIX, asked, level


def plan(*compared: Setup, rounds: int = 1, max_tokens: int = 6) -> Plan:
    prompts = ((asked("a short one"),), (asked("b"), asked("a prompt of many characters")))
    return Plan(compared, OPTIONS, (1, 2), prompts, (asked("w"), asked("ww")), max_tokens, rounds)


def launching(
    habits: dict[str, str], started: list[str]
) -> Callable[[Plan, Setup, int], tuple[list[str], dict[str, str]]]:
    def launch(plan: Plan, setup: Setup, port: int) -> tuple[list[str], dict[str, str]]:
        started.append(setup.name)
        habit = habits.get(setup.name, "")
        module = "tests.pipelines.bench.serve.fake_vllm"
        return [sys.executable, "-m", module, str(port), habit], dict(os.environ)

    return launch


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_every_setup_is_measured_at_every_concurrency_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    started: list[str] = []
    out = tmp_path / "new" / "serve.json"
    console = Console(file=io.StringIO(), width=200)
    made = bench.run(plan(NONE, HYBRID, rounds=2), out, console, launching({}, started))
    assert "round 1/2 none: starting: 0 of 12" in console.file.getvalue()
    assert started == ["none", "hybrid", "none", "hybrid"]
    assert json.loads(out.read_text()) == made
    assert [(r["concurrency"], r["configuration"]) for r in made["records"]] == [
        (1, "none"), (1, "hybrid"), (2, "none"), (2, "hybrid"),
    ]  # fmt: skip
    for record in made["records"]:
        assert record["rounds"] == 2
        assert record["tokens"] == 2 * 6 * record["concurrency"]
        assert record["mean_accepted"] == 1.0  # the warm-up is not in it: counters are differences
        assert record["cycles_per_1k"] == 500
        assert record["tok_per_cpu_s"] is None or record["tok_per_cpu_s"] > 0
        assert record["equal_to_none"] == record["compared_with_none"] == record["answers"]
    assert unequal(made) == []


def test_servers_of_a_round_can_be_up_together_and_one_that_fails_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, children = [], []
    start = processes.start

    def remembered(*args: Any) -> Any:
        alive.append(sum(child.is_alive for child in children))
        children.append(start(*args))
        return children[-1]

    monkeypatch.setattr(processes, "start", remembered)
    out = tmp_path / "o.json"
    habits = {"suffix-k8": "tire"}
    whole = replace(plan(NONE, SUFFIX, HYBRID), together=True)
    made = bench.run(whole, out, quiet(), launching(habits, []))
    assert alive == [0, 1, 2], "they are up at the same time"
    assert not any(child.is_alive for child in children)
    assert set(made["skipped"]) == {"suffix-k8"}, "it answered nothing at the second concurrency"
    assert [(r["concurrency"], r["configuration"]) for r in made["records"]] == [
        (1, "none"), (1, "hybrid"), (2, "none"), (2, "hybrid"),
    ]  # fmt: skip
    again = bench.run(whole, out, quiet(), launching({}, []))
    assert len(children) == 3, "who failed beside the others is not measured alone"
    assert again["records"] == made["records"] and "--json" in again["skipped"]["suffix-k8"]
    with pytest.raises(SettingsError, match=r"together differ.*--json"):
        bench.run(plan(NONE), out, quiet(), launching({}, []))


def test_answers_that_differ_are_counted_and_named(tmp_path: Path) -> None:
    made = bench.run(
        plan(NONE, HYBRID), tmp_path / "o.json", quiet(), launching({"hybrid": "differ"}, [])
    )
    assert unequal(made) == [
        "hybrid at 1: only 0 of 1 answers equal those of 'none' token for token.",
        "hybrid at 2: only 0 of 2 answers equal those of 'none' token for token.",
    ]


def test_a_refused_prompt_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    made = bench.run(
        plan(NONE), tmp_path / "o.json", quiet(), launching({"none": "refuse-long"}, [])
    )
    assert [(r["answers"], r["failed"], r["tokens"]) for r in made["records"]] == [
        (1, 0, 6), (1, 1, 6),
    ]  # fmt: skip


def test_a_server_that_does_not_start_is_passed_over(tmp_path: Path) -> None:
    started: list[str] = []
    out = tmp_path / "o.json"
    made = bench.run(
        plan(NONE, SUFFIX, rounds=2), out, quiet(), launching({"suffix-k8": "die"}, started)
    )
    assert started == ["none", "suffix-k8", "none"]
    assert "no weights to be found" in made["skipped"]["suffix-k8"]
    assert {r["configuration"] for r in made["records"]} == {"none"}


def test_a_run_without_any_server_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    with pytest.raises(ProcessError, match=r"none of 2 requests.*too long for me"):
        bench.run(plan(NONE), out, quiet(), launching({"none": "refuse"}, []))
    assert not out.exists()


def test_ctrl_c_stops_the_server_keeps_what_is_measured_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    children = []
    start = processes.start

    def remembered(*args: Any) -> Any:
        children.append(start(*args))
        return children[-1]

    monkeypatch.setattr(processes, "start", remembered)
    out, whole = tmp_path / "o.json", plan(NONE, HYBRID)
    with pytest.raises(KeyboardInterrupt):
        bench.run(whole, out, quiet(), launching({"hybrid": "interrupt"}, started))
    assert [child.is_alive for child in children] == [False, False]
    assert {r["configuration"] for r in json.loads(out.read_text())["records"]} == {"none"}
    made = bench.run(whole, out, quiet(), launching({}, started))
    assert started == ["none", "hybrid", "hybrid"]
    assert {r["configuration"] for r in made["records"]} == {"none", "hybrid"}


def test_servers_are_told_to_end_at_once_and_a_second_signal_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []
    start = processes.start
    monkeypatch.setattr(
        processes, "start", lambda *args: children.append(start(*args)) or children[-1]
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    (told := tmp_path / "told").mkdir()
    habits = {"none": f"company:{told}:", "hybrid": f"company:{told}:interrupt"}
    try:
        with pytest.raises(KeyboardInterrupt):
            both = replace(plan(NONE, HYBRID), together=True)
            bench.run(both, tmp_path / "o.json", quiet(), launching(habits, []))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [child.ending() for child in children] == ["ended with status 0"] * 2


def test_further_setups_and_rounds_join_what_is_measured(tmp_path: Path) -> None:
    started: list[str] = []
    out, launch = tmp_path / "o.json", launching({}, started)
    bench.run(plan(NONE), out, quiet(), launch)
    made = bench.run(plan(NONE, HYBRID, rounds=2), out, quiet(), launch)
    assert started == ["none", "hybrid", "none", "hybrid"]
    assert {(r["configuration"], r["rounds"]) for r in made["records"]} == {
        ("none", 2), ("hybrid", 2),
    }  # fmt: skip
    made = bench.run(plan(HYBRID), out, quiet(), launch)
    assert {r["configuration"] for r in made["records"]} == {"hybrid"}
    assert len(started) == 4


def test_kept_figures_of_another_setting_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    bench.run(plan(NONE), out, quiet(), launching({}, []))
    with pytest.raises(SettingsError, match=r"max_tokens differ.*--json"):
        bench.run(plan(NONE, max_tokens=7), out, quiet(), launching({}, []))


def test_kept_figures_come_back_as_they_were_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "r.jsonl", {"a": 1})
    assert journal.read() == []
    first, second = (ServerRun(i, "none", 1.0, (level(3.0),)) for i in range(2))
    journal.add(first)
    journal.add(second)
    assert journal.read() == [first, second]
    journal.path.write_text(journal.path.read_text()[:-30])
    with pytest.raises(SettingsError, match=r"r\.jsonl:3 is not a measured server.*--json"):
        journal.read()
