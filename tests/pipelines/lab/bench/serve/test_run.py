"""Whole serving benchmarks, against server processes that talk like vLLM (``fake_vllm``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.errors import ProcessError
from pipelines import reports
from pipelines.lab.bench.serve import run as bench
from pipelines.lab.bench.serve.setups import Plan
from pipelines.lab.bench.serve.summary import unequal
from pipelines.stack import processes
from tests.pipelines.lab.bench.serve.served import HYBRID, NONE, SUFFIX, launching, plan, quiet


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every server process that is started."""
    found: list[Any] = []
    start = processes.start
    monkeypatch.setattr(processes, "start", lambda *a: found.append(start(*a)) or found[-1])
    return found


def measured(
    of: Plan, out: Path, habits: dict[str, str] | None = None, started: list[str] | None = None
) -> dict[str, Any]:
    launch = launching(habits or {}, [] if started is None else started)
    return bench.run(of, out, quiet(), launch)


def test_every_setup_is_measured_at_every_concurrency_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "LINE_SECONDS", 0.0)
    started: list[str] = []
    out, console = tmp_path / "new" / "serve.json", quiet()
    bench.run(plan(NONE), out, console, launching({}, started))
    assert "round 1/1 none: starting: 0 of 3" in console.file.getvalue()
    made = measured(plan(NONE, HYBRID, rounds=2), out, started=started)
    assert started == ["none", *["none", "hybrid"] * 2]
    assert json.loads(out.read_text()) == made
    assert [(r["concurrency"], r["configuration"]) for r in made["records"]] == [
        (1, "none"), (1, "hybrid"), (2, "none"), (2, "hybrid"),
    ]  # fmt: skip
    for record in made["records"]:
        assert record["rounds"] == 2
        assert record["tokens"] == 2 * 6 * record["concurrency"]
        assert record["mean_accepted"] == 1.0  # the warm-up is not in it: counters are differences
        assert record["cycles_per_1k"] == 500 and record["ran"] == ["V2, asynchronous"]
        assert record["tok_per_cpu_s"] is None or record["tok_per_cpu_s"] > 0
        assert record["equal_to_none"] == record["compared_with_none"] == record["answers"]
    assert unequal(made) == []


def test_servers_of_a_round_can_be_up_together_and_one_that_fails_holds_up_no_other(
    tmp_path: Path, children: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    start = processes.start

    def counted(*args: Any) -> Any:
        alive.append(sum(child.is_alive for child in children))
        return start(*args)

    monkeypatch.setattr(processes, "start", counted)
    out = tmp_path / "o.json"
    whole = plan(NONE, SUFFIX, HYBRID, together=True)
    made = measured(whole, out, {"suffix-k8": "tire"})
    assert alive == [0, 1, 2], "they are up at the same time"
    assert not any(child.is_alive for child in children)
    assert set(made["skipped"]) == {"suffix-k8"}, "it answered nothing at the second concurrency"
    assert [(r["concurrency"], r["configuration"]) for r in made["records"]] == [
        (1, "none"), (1, "hybrid"), (2, "none"), (2, "hybrid"),
    ]  # fmt: skip


@pytest.mark.parametrize(("by_turns", "answered"), [(False, (1, 1)), (True, (2, 2))])
def test_answers_that_differ_are_named_and_a_refused_request_is_counted(
    tmp_path: Path, by_turns: bool, answered: tuple[int, int]
) -> None:
    """Of a session what follows the first difference is not compared, and what the server said
    stands in the next turn's context, whose length is the first token of an answer."""
    habits = {"hybrid": "differ", "suffix-k8": "refuse-long"}
    whole, out = plan(NONE, SUFFIX, HYBRID, by_turns=by_turns), tmp_path / "o.json"
    made = measured(whole, out, habits)
    assert unequal(made) == [
        "hybrid at 1: only 0 of 1 answers equal those of 'none' token for token.",
        "hybrid at 2: only 0 of 2 answers equal those of 'none' token for token.",
    ]
    counts = [(r["answers"], r["failed"]) for r in made["records"]
              if r["configuration"] == "suffix-k8"]  # fmt: skip
    assert counts == [(answered[0], 0), (answered[1], 1)]
    if by_turns:
        launch = launching({}, [])
        (alone,), _ = bench.measure(whole, [NONE], 0, tmp_path, lambda *_: None, launch)
        replies = [(r.prompt, r.turn, r.tokens[0]) for r in alone.levels[0].replies]
        assert replies == [("d:s", 0, 4), ("d:s", 1, 4 + len("xxx") + 2)]
        lone = made["records"][0]
        assert (lone["sessions"], lone["answers"], lone["tokens"], lone["failed"]) == (1, 2, 12, 0)
        assert lone["groups"]["warm"]["answers"] == 1 and made["benchmark"] == "sessions"


def test_a_server_that_does_not_start_is_passed_over_and_a_run_without_any_is_an_error(
    tmp_path: Path,
) -> None:
    started, out = list[str](), tmp_path / "o.json"
    with pytest.raises(ProcessError, match=r"none of 2 requests.*too long for me"):
        measured(plan(NONE), out, {"none": "refuse"})
    assert not out.exists()
    made = measured(plan(NONE, SUFFIX, rounds=2), out, {"suffix-k8": "die"}, started)
    assert started == ["none", "suffix-k8", "none"]
    assert "no weights to be found" in made["skipped"]["suffix-k8"]
    assert {r["configuration"] for r in made["records"]} == {"none"}


def test_ctrl_c_stops_the_server_and_reports_what_is_measured(
    tmp_path: Path, children: list[Any]
) -> None:
    started: list[str] = []
    out, whole = tmp_path / "o.json", plan(NONE, HYBRID)
    with pytest.raises(KeyboardInterrupt):
        measured(whole, out, {"hybrid": "interrupt"}, started)
    assert [child.is_alive for child in children] == [False, False]
    assert {r["configuration"] for r in json.loads(out.read_text())["records"]} == {"none"}


def test_servers_are_told_to_end_at_once_and_a_second_signal_leaves_none_behind(
    tmp_path: Path, children: list[Any]
) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    (told := tmp_path / "told").mkdir()
    habits = {"none": f"company:{told}:", "hybrid": f"company:{told}:interrupt"}
    try:
        with pytest.raises(KeyboardInterrupt):
            measured(plan(NONE, HYBRID, together=True), tmp_path / "o.json", habits)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [child.ending() for child in children] == ["ended with status 0"] * 2


@pytest.mark.engine
@pytest.mark.long
def test_served_sessions_are_those_of_plain_decoding_and_their_context_is_cached(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "bench", "serve", "--sessions", "--limit", "2",
         "--turns", "2", "--max-tokens", "48", "--concurrency", "1,2", "--rounds", "1",
         "--configs", "none,hybrid", "--dtype", "float32", "--check", "--json", "s.json"],
        check=False, capture_output=True, text=True, timeout=580, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[5])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "s.json").read_text())
    assert [(r["configuration"], r["concurrency"], r["answers"]) for r in made["records"]] == [
        ("none", 1, 8), ("hybrid", 1, 8), ("none", 2, 8), ("hybrid", 2, 8),
    ]  # fmt: skip
    for record in made["records"]:
        assert record["equal_to_none"] == record["compared_with_none"] == record["answers"]
        assert record["groups"]["warm"]["answers"] == record["answers"] / 2
        # whole blocks only, and a drafter has the last of them read again
        assert record["prompt_tokens_cached_share"] > 0.1, "a turn's context was there before"
    hybrids = [r for r in made["records"] if r["configuration"] == "hybrid"]
    assert all(r["cycles_per_1k"] < 1000 for r in hybrids)
