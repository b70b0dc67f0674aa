"""What a demo sends, breaks and says of itself."""

from __future__ import annotations

import io
import json
import pkgutil
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import torch
from rich.console import Console

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.demo.breakage import OPTIONS, Breakage, set_broken
from pipelines.demo.run import (
    ENOUGH_DRAFTS,
    is_over,
    outcome,
    status_line,
    timing,
    write,
)
from pipelines.demo.summary import Run, Summary, lesson, summarise
from pipelines.demo.traffic import (
    FAILURES_ALLOWED,
    PLANS,
    Traffic,
    connected,
    plain_step_s,
    planned,
)
from pipelines.stack.running import KEY_VARIABLE
from pipelines.watch.ledger import Ledger, Phase
from pipelines.workloads import WORKLOADS, prompts
from tests.pipelines.watch import records
from tests.pipelines.watch.records import EVENTS, FASTER, WORKER, recorded


def sent(handler, count: int = 1) -> Traffic:
    """Traffic after so many requests to a worker that answers as ``handler`` does."""
    traffic = Traffic("http://worker", "model", Ledger(WORKER))
    traffic.stopping.set()  # waits for nothing
    traffic._next = prompts("chat")
    transport = httpx.MockTransport(handler)
    with httpx.Client(base_url="http://worker", transport=transport) as client:
        for _ in range(count):
            traffic.send(client)
    return traffic


def test_traffic_has_the_key_that_the_worker_asks_for_and_goes_by_no_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")  # httpx alone would raise
    for key, sent_key in (("", None), ("hunter", "Bearer hunter")):
        monkeypatch.setenv(KEY_VARIABLE, key)
        with connected("http://127.0.0.1:8000") as client:
            assert client.headers.get("Authorization") == sent_key and not client.trust_env


def test_a_request_names_its_workload_and_decodes_greedily() -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        choice = {"token_ids": [7, 8]}
        told = {"usage": {"completion_tokens": 12}, "choices": [choice]}
        return httpx.Response(200, json=told | {"prompt_token_ids": [1, 2, 3]})

    traffic = sent(handler)
    assert traffic.counts == {"answered": 1, "tokens": 12}
    ((answer,),) = traffic.answers.values()
    assert (answer.prompt, answer.output, answer.workload) == ([1, 2, 3], [7, 8], "chat")
    ((path, asked),) = seen
    assert path == "/v1/chat/completions"
    assert asked["vllm_xargs"] == {"hvd_workload": "chat"}
    assert (asked["temperature"], asked["messages"]) == (0, list(next(prompts("chat")).messages))


@pytest.mark.parametrize(
    ("response", "word"),
    [
        (httpx.Response(500, text="engine died"), "engine died"),
        (httpx.Response(200, text="<html>"), "JSON"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
    ],
)
def test_a_failed_request_is_counted_and_many_in_a_row_end_the_run(response, word: str) -> None:
    handler = Mock(side_effect=response if isinstance(response, Exception) else lambda _: response)
    few = sent(handler, FAILURES_ALLOWED)
    assert few.counts == {"failed": FAILURES_ALLOWED, "tokens": 0}
    few.check()
    with pytest.raises(ProcessError, match=word):
        sent(handler, FAILURES_ALLOWED + 1).check()


@pytest.mark.parametrize("minutes", [1.0, 6.5, 30.0])
def test_a_slow_machine_leaves_phases_out_and_never_the_records(minutes: float) -> None:
    everything = {plan.name for plan in PLANS}
    kept = set(everything)
    for step_s in (0.001, 0.01, 0.03, 0.08, 0.3, 3.0):
        plans = planned(step_s, 60.0 * minutes)
        assert sum(seconds for _, seconds in plans) == pytest.approx(60.0 * minutes)
        needed = sum(plan.steps for plan, _ in plans) * step_s
        now = {plan.name for plan, _ in plans}
        assert now <= kept, "a slower machine has time for no more"
        assert {"one agent", "conversation", "records"} <= now
        assert needed <= 60.0 * minutes or len(now) == 3
        kept = now
    assert {plan.name for plan, _ in planned(0.001, 60.0 * minutes)} == everything
    assert "records" not in timing(0.077, 390.0, ["three agents"])
    assert "three agents" in timing(0.077, 390.0, ["three agents"])


def test_a_slow_machines_phases_have_time_for_the_pairs_that_an_interval_takes() -> None:
    plans = {plan.name: seconds for plan, seconds in planned(0.077, 390.0)}
    assert plans["records"] > 150.0 and min(plans["one agent"], plans["conversation"]) > 55.0


class Clock:
    """Time that passes only while a worker decodes: a second for what it reads, then its steps."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s, self.asked = 0.0, step_s, list[int]()

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["vllm_xargs"] == {"hvd_speculate": "off"} and body["ignore_eos"]
        self.asked.append(body["max_tokens"])
        self.now += (5.0 if len(self.asked) == 1 else 1.0) + self.step_s * body["max_tokens"]
        return httpx.Response(200, json={})


@pytest.mark.parametrize("step_s", [0.02, 0.077, 3.0])
def test_a_plain_step_is_timed_without_what_the_first_request_makes_ready(
    step_s: float, monkeypatch
) -> None:
    clock = Clock(step_s)
    client = partial(httpx.Client, transport=httpx.MockTransport(clock.answer))
    monkeypatch.setattr("pipelines.demo.traffic.httpx.Client", client)
    monkeypatch.setattr("pipelines.demo.traffic.time.monotonic", lambda: clock.now)
    assert plain_step_s("http://worker", "model") == pytest.approx(step_s, rel=0.05)
    assert step_s < 1.0 or max(clock.asked) < 10, "a worker that takes seconds is not kept busy"


def test_a_broken_drafter_is_wrong_about_everything_and_a_mended_one_is_as_it_was() -> None:
    norm, breakage = torch.nn.LayerNorm(4, bias=False), Breakage()
    head = SimpleNamespace(model=SimpleNamespace(norm=norm))
    breakage.model_runner = SimpleNamespace(drafter=SimpleNamespace(model=head))
    hidden = torch.tensor([0.5, -1.0, 2.0, 0.1])
    before = norm(hidden)
    assert pkgutil.resolve_name(OPTIONS[-1]) is Breakage, "where the worker is told to find it"
    for broken in ("no", "yes", "yes", "no", "no"):  # said twice it does no more
        breakage.set_drafter_broken(broken)
        assert torch.equal(norm(hidden), -before if broken == "yes" else before)
    with pytest.raises(ProcessError, match="could not be broken"):
        set_broken(f"http://127.0.0.1:{machine.free_port()}", True)


REQUESTS = {"answered": 2, "failed": 0, "tokens": 280}


def summary_of(ledger: Ledger, **requests: int) -> Summary:
    return summarise(ledger, Run(REQUESTS | requests, 1000.0))


def test_figures_are_of_this_run_alone_and_every_comparison_has_its_phases() -> None:
    ledger = recorded()
    ledger.add_status(records.learner_status(1121.0, EVENTS + 1000))
    found = summarise(ledger, Run(REQUESTS, 1000.0, consumed_before=1000))
    summary = json.loads(json.dumps(found, allow_nan=False))
    assert (summary["requests_answered"], summary["requests_failed"]) == (2, 0)
    assert (summary["events_consumed"], summary["events_lost"]) == (EVENTS, 0)
    assert summary["policy_versions_applied"] == [2] and summary["worker"]["policy_version"] == 2
    for phase in summary["phases"]:
        assert phase["arm_shares"] == {"cache": 0.75, "model": 0.0, "none": 0.25}
        assert phase["events"] == 240
    assert set(summary["uplift"]) == {"over_plain", "over_suffix", "over_first"}
    for one in summary["uplift"].values():
        assert one["pairs"] == 60 and one["low"] < one["ratio"] < one["high"]
        assert list(one["kinds"]) == ["agentic", "conversation"]


@pytest.mark.parametrize(
    ("ledger", "failed", "kind", "word"),
    [
        (recorded(lost=3), 0, "failings", "3 events were lost"),
        (recorded(), 1, "failings", "1 requests failed"),
        (Ledger(records.WORKER), 0, "failings", "no events were made"),
        (recorded(champion=60.0), 0, "sentences", "faster than plain decoding"),
    ],
)
def test_a_fault_fails_a_run_and_what_time_was_too_short_to_show_does_not(
    ledger: Ledger, failed: int, kind: str, word: str
) -> None:
    summary = summary_of(ledger, failed=failed)
    assert any(word in said for said in summary[kind])
    assert summary["ok"] is (summary["failings"] == []) is (kind == "sentences")


def test_a_phase_lasts_until_there_are_pairs_enough_whatever_they_say() -> None:
    ledger = recorded()
    assert is_over(ledger, PLANS[0], 0)
    ledger.rounds = records.rounds(36, 1000.0, 2.0, {CHAMPION: 60.0, "plain": 40.0})
    assert not is_over(ledger, PLANS[0], 0), "six pairs of this phase"
    ledger.phases.append(Phase("to come", ("chat",), "to come", 1130.0))
    assert not is_over(ledger, PLANS[0], 0)


def test_each_kind_of_traffic_is_set_beside_its_best_and_its_worst_fixed_method() -> None:
    ledger = recorded(**FASTER, model=75.0)
    ledger.phases.append(Phase("too short", ("chat",), "too short", 1119.0, 1120.0))
    summary = summary_of(ledger)
    ends = ("model", "plain")
    assert summary["best_and_worst"] == {"agentic": ends, "conversation": ends, "too short": None}
    (choice,) = [said for said in summary["sentences"] if "best and the worst" in said]
    assert "too short" not in choice
    assert re.search(r"agentic: 0\.(79|80) .* times EAGLE3 decoding, 1\.\d+ .* times plain", choice)
    one = replace(ledger, phases=[replace(p, kind="all alike") for p in ledger.phases])
    assert list(summary_of(one)["best_and_worst"]) == ["all alike"], "compared as one"


def test_what_became_of_a_policy_that_was_promoted_by_mistake_is_told() -> None:
    ledger = recorded()
    assert outcome(ledger, 3)["in_force"] is False, "no worker has taken it in"
    ledger = recorded(version=3)
    for second, fallback, version in ((122, "", 3), (125, "cache", 3), (140, "", 1)):
        changes = {"policy_version": version, "policy_applied_at": 1140 if version == 1 else 1060}
        ledger.add_status(records.worker_status(1000.0 + second, 1, fallback=fallback, **changes))
    found = outcome(ledger, 3) | {"why": "it was slower"}
    assert (found["relieved_s"], found["taken_back_s"], found["successor"]) == (65.0, 80.0, 1)
    told = summarise(ledger, Run(REQUESTS, 1000.0, mistake=found))["sentences"][3]
    assert "Version 3" in told and "after 65 seconds" in told and "it was slower" in told
    assert "No bad policy" in summary_of(recorded())["sentences"][3]
    for came in (outcome(recorded(version=3), 3), outcome(recorded(), 3)):
        told = summarise(ledger, Run(REQUESTS, 1000.0, mistake=came))["sentences"][3]
        assert ("nothing replaced it" if came["in_force"] else "no worker loaded it") in told


def test_a_copy_of_an_earlier_report_breaks_off_at_the_number_of_the_order() -> None:
    _, first, _, second, asked = (m["content"] for m in next(prompts("records")).messages)
    numbers = [set(re.findall(r"\d+", text)) for text in (first, second, asked)]
    assert [len(some) for some in numbers] == [1, 1, 1] and len(set.union(*numbers)) == 3
    assert re.sub(r"\d+", "", first) == re.sub(r"\d+", "", second)
    assert "records" not in WORKLOADS, "made to mislead: nothing else is measured or trained on it"


RECORDS = Phase("records", ("records",), "records", 1030.0, 1100.0)


def test_the_learners_phase_sets_what_was_foreseen_beside_what_came_before_and_after() -> None:
    ledger = recorded()
    found = lesson(ledger, RECORDS) | {"answers": 70, "why": "evidence of 31 clusters"}
    assert (found["version"], found["after_s"]) == (2, 30.0)
    assert found["before"] == {"drafts": 120, "foreseen": 3.0, "accepted": 5.0, "off": 2.0}
    assert found["after"] == {"drafts": 160, "foreseen": 4.5, "accepted": 5.0, "off": 0.5}
    told = summarise(ledger, Run(REQUESTS, 1000.0, lesson=found))["sentences"][2]
    words = "3.00 accepted", "5.00 were", "error of 2.00", "version 2", "after 30 seconds"
    for word in words:
        assert word in told
    assert "evidence of 31 clusters" in told and "4.50" in told and "error of 0.50" in told
    by_hand = recorded()
    by_hand._published = [p for p in by_hand._published if not p.policy or p.policy.version == 1]
    for one, phase in ((by_hand, RECORDS), (ledger, replace(RECORDS, ended=1050.0))):
        none = lesson(one, phase) | {"answers": 70}
        assert none["after"] is none["version"] is none["after_s"] is None
        told = summarise(one, Run(REQUESTS, 1000.0, lesson=none))["sentences"][2]
        assert "cannot be told yet, after 70 answers; in simulation it took up to 120" in told
    nothing = lesson(Ledger(WORKER), RECORDS) | {"answers": 0}
    assert summarise(Ledger(WORKER), Run(REQUESTS, 1000.0, lesson=nothing))["sentences"]


def test_the_learners_phase_lasts_until_its_policy_has_foreseen_drafts_enough() -> None:
    ledger, (plan,) = recorded(), [plan for plan in PLANS if plan.learns]
    ledger.phases = [RECORDS]
    assert lesson(ledger, RECORDS)["after"]["drafts"] < ENOUGH_DRAFTS
    assert not is_over(ledger, plan, 0)
    made = [records.event(EVENTS + i, 1110.0, policy_version=2) for i in range(ENOUGH_DRAFTS)]
    ledger.add_drafts(records.batch(made))
    ledger.phases = [replace(RECORDS, ended=1120.0)]
    assert is_over(ledger, plan, 0)


def test_six_sentences_say_what_was_shown_and_no_more() -> None:
    speed, _, learning, _, trust = summary_of(recorded(), failed=1)["sentences"][:5]
    assert "1.5" in speed and "plain decoding" in speed and " to " in speed
    assert "480 draft events" in learning and "served 1 of the policies" in learning
    assert learning.startswith("It began with v1, learned from 480")
    assert "none of 480 draft events were lost" in trust and "1 of 3 requests failed" in trust
    slower = summary_of(recorded(**{**FASTER, "plain": 90.0}, lost=1))["sentences"]
    assert "slower than plain decoding in agentic, conversation" in slower[4]
    nothing = summary_of(Ledger(records.WORKER))["sentences"]
    assert len(nothing) == 6 and "too short to compare" in nothing[0]


def test_a_run_is_written_and_shown_at_every_stage(tmp_path: Path) -> None:
    for ledger in (recorded(), Ledger(records.WORKER)):
        summary = summary_of(ledger)
        write(ledger, summary, tmp_path)
        assert json.dumps(summary["sentences"][0]) in (tmp_path / "report.html").read_text()
        assert json.loads((tmp_path / "summary.json").read_text())["ok"] is summary["ok"]
        console = Console(width=160, record=True, file=io.StringIO())
        ledger.phases.append(Phase("begins", ("chat",), "begins", 1130.0))
        console.print(status_line(ledger))
        shown = console.export_text()
        assert "over plain decoding" in shown and ("1.5" in shown) is bool(ledger.rounds)
