from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from decoder.contracts.bundle import CHAMPION, frequency_policy
from pipelines.demo import dashboard
from pipelines.demo.run import Run, is_clear, write
from pipelines.demo.sentences import sentences
from pipelines.demo.summary import Summary, summarise
from pipelines.watch.ledger import Answer, Ledger, Phase
from tests.pipelines.watch.records import (
    SCOPE,
    WORKER,
    batch,
    event,
    learner_status,
    rounds,
    worker_status,
)

FASTER = {CHAMPION: 60.0, "plain": 40.0, "suffix": 55.0, "first": 60.0}


def recorded(
    lost: int = 0, versions: tuple[int, ...] = (1, 2), rates: dict[str, float] | None = None
) -> Ledger:
    """Two minutes of a run: 480 events, ``lost`` of them never learned from."""
    ledger = Ledger(WORKER)
    count = 480
    for second in range(121):
        version = versions[0] if second < 60 else versions[-1]
        ledger.add_status(
            worker_status(
                1000.0 + second,
                30 * second,
                events_made=4 * second,
                policy_version=version,
                policy_applied_at=1060.0 if second >= 60 else 999.0,
                policy_kind="frequency",
                swap_ms_max=2.5 if second >= 60 else 0.0,
                step_us={"1": 20_000, "8": 30_000},
            )
        )
        ledger.add_status(learner_status(1000.0 + second, min(4 * second, count - lost)))
    arms = ("cache", "cache", "cache", "none")
    made = [(i, versions[i >= count // 2]) for i in range(count)]
    ledger.add_drafts(
        batch([event(i, 1000.0 + i / 4, policy_version=v, arm=arms[i % 4]) for i, v in made])
    )
    start = frequency_policy(SCOPE)
    ledger.add_policy(999.0, SCOPE, CHAMPION, replace(start, version=1))
    learned = replace(start, version=2, provenance={"origin": "learner"})
    ledger.add_policy(1059.0, SCOPE, CHAMPION, learned)
    for one in rounds(60, 1000.0, 2.0, rates or FASTER):
        ledger.add_round(one)
    ledger.phases = [
        Phase("agentic", ("edits", "tools"), 1000.0, 1060.0),
        Phase("conversation", ("chat", "code"), 1060.0, 1120.0),
    ]
    ledger.answers = [
        Answer("edits", 1003.0, 2.0, 120),
        Answer("chat", 1088.0, 2.0, 160),
        Answer("chat", 1089.0, 2.0, 0, error="HTTP 500: no"),
    ]
    return ledger


def summary_of(ledger: Ledger) -> Summary:
    return summarise(ledger, "a machine", 1000.0)


def test_figures_come_from_the_ledger() -> None:
    summary = summary_of(recorded())
    assert (summary.requests, summary.requests_failed, summary.tokens) == (2, 1, 280)
    produced = (summary.events_produced, summary.events_consumed, summary.events_lost)
    assert produced == (480, 480, 0)
    assert summary.policy_versions_applied == [2]
    assert summary.swap_ms_max == 2.5
    assert summary.tok_per_s == {"agentic": 30.0, "conversation": 30.0}
    assert summary.arm_shares["agentic"] == {"cache": 0.75, "model": 0.0, "none": 0.25}
    assert summary.mae == {"agentic": 2.0, "conversation": 2.0}
    assert summary.labels == {"verified": 480}
    assert summary.failings == ["1 requests failed"]


def test_uplift_has_every_comparison_over_all_and_by_phase() -> None:
    uplift = json.loads(json.dumps(summary_of(recorded()).as_dict()))["uplift"]
    assert set(uplift) == {"over_plain", "over_suffix", "over_first_policy"}
    for one in uplift.values():
        assert one["pairs"] == 60
        assert one["low"] < one["ratio"] < one["high"]
        assert list(one["phases"]) == ["agentic", "conversation"]
        assert all(phase["low"] < phase["ratio"] for phase in one["phases"].values())
    assert uplift["over_plain"]["ratio"] == pytest.approx(1.5, rel=0.03)
    assert uplift["over_first_policy"]["ratio"] == pytest.approx(1.0, rel=0.03)


def test_events_that_the_learner_had_before_do_not_count() -> None:
    ledger = recorded()
    ledger.add_status(learner_status(1121.0, 1480))
    assert summarise(ledger, "a machine", 1000.0, consumed_before=1000).events_lost == 0


def faulty() -> Ledger:
    ledger = recorded()
    ledger.add_status(worker_status(1121.0, 3630, events_made=480, policy_version=2, faults=2))
    return ledger


@pytest.mark.parametrize(
    ("ledger", "word"),
    [
        (recorded(lost=3), "3 events were lost"),
        (recorded(), "1 requests failed"),
        (faulty(), "2 faults"),
        (Ledger(WORKER), "made no events"),
    ],
)
def test_what_fails_a_run(ledger: Ledger, word: str) -> None:
    assert any(word in failing for failing in summary_of(ledger).failings)


@pytest.mark.parametrize(
    ("ledger", "word"),
    [
        (recorded(versions=(0, 0)), "Nothing that was learned"),
        (recorded(rates={**FASTER, "plain": 60.0}), "faster than plain decoding cannot be told"),
        (recorded(rates={CHAMPION: 60.0}), "faster than plain decoding cannot be told"),
    ],
)
def test_what_time_was_too_short_to_show_is_said_and_fails_nothing(
    ledger: Ledger, word: str
) -> None:
    ledger.answers = ledger.answers[:2]
    summary = summary_of(ledger)
    assert any(word in note for note in summary.notes)
    assert summary.failings == []


def test_a_phase_lasts_until_each_comparison_is_clear() -> None:
    ledger = recorded()
    assert is_clear(ledger) is True
    ledger.rounds = rounds(36, 1000.0, 2.0, {CHAMPION: 60.0, "plain": 40.0})
    assert is_clear(ledger) is False, "six pairs of this phase have no interval"
    ledger.phases.append(Phase("to come", ("chat",), 1130.0))
    assert is_clear(ledger) is False


def test_three_sentences_say_what_was_shown_and_no_more() -> None:
    speed, learning, trust = sentences(summary_of(recorded()))
    assert "1.5" in speed and "plain decoding" in speed and " to " in speed
    assert "480 draft events" in learning and "after 60 seconds" in learning
    assert "the policy that ships" in learning
    assert "no draft events were lost" in trust and "of 3 requests 1 failed" in trust
    slower = sentences(summary_of(recorded(rates={**FASTER, "plain": 90.0}, lost=1)))
    assert "slower than plain decoding in agentic, conversation" in slower[2]
    assert "1 draft event was lost" in slower[2]
    nothing = sentences(summary_of(Ledger(WORKER)))
    assert len(nothing) == 3
    assert "too short to say" in nothing[0]


def test_a_run_is_written_as_figures_and_a_page(tmp_path) -> None:
    ledger = recorded()
    page = write(Run(ledger, summary_of(ledger), ""), tmp_path)
    assert "written" in page.read_text()
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["failings"] == ["1 requests failed"] and written["notes"]
    assert written["uplift"]["over_plain"]["pairs"] == 60


def test_a_run_that_saw_nothing_is_written_too(tmp_path) -> None:
    ledger = Ledger(WORKER)
    page = write(Run(ledger, summary_of(ledger), ""), tmp_path)
    assert "made no events" in page.read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["ok"] is False


def test_the_terminal_shows_a_run_at_every_stage() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    for ledger in (Ledger(WORKER), recorded()):
        assert "10 s left" in dashboard.line(ledger, 10.0)
    assert "over plain decoding 1." in dashboard.line(recorded(), 10.0)
    console.print(dashboard.outcome(summary_of(recorded())))
    text = console.export_text()
    assert "over plain decoding" in text
    assert "of 3 requests 1 failed." in text
