from __future__ import annotations

import io
import json

import pytest

from pipelines.demo import dashboard, report
from pipelines.demo.summary import Summary, summarise
from pipelines.watch.ledger import Answer, Ledger, Phase
from tests.pipelines.watch.records import ORIGIN, WORKER, event, learner_status, worker_status


def recorded(lost: int = 0, versions: tuple[int, ...] = (1, 2)) -> Ledger:
    """Ten seconds of a run: 40 events, ``lost`` of them never learned from."""
    ledger = Ledger(WORKER)
    count = 40
    for second in range(11):
        version = versions[0] if second < 5 else versions[-1]
        ledger.add_status(
            worker_status(
                100.0 + second,
                30 * second,
                cycles={"cache": 3 * second, "none": second},
                accepted={"cache": 9 * second},
                events_made=4 * second,
                policy_version=version,
                policy_applied_at=104.5 if second >= 5 else 99.0,
                swap_ms_max=2.5 if second >= 5 else 0.0,
            )
        )
        ledger.add_status(learner_status(100.0 + second, min(4 * second, count - lost)))
    made = [(i, versions[i >= count // 2]) for i in range(count)]
    ledger.add_events(ORIGIN, [event(i, 100.0 + i / 4, policy_version=v) for i, v in made])
    ledger.phases = [
        Phase("A agentic", ("edits", "tools"), 100.0, 105.0),
        Phase("B conversation", ("chat", "code"), 105.0, 110.0),
    ]
    ledger.answers = [
        Answer("edits", 103.0, 2.0, 120),
        Answer("chat", 108.0, 2.0, 160),
        Answer("chat", 109.0, 2.0, 0, error="HTTP 500: no"),
    ]
    return ledger


def summary_of(ledger: Ledger) -> Summary:
    return summarise(ledger, "a machine", 100.0)


def test_figures_come_from_the_ledger() -> None:
    summary = summary_of(recorded())
    assert (summary.requests, summary.requests_failed, summary.tokens) == (2, 1, 280)
    produced = (summary.events_produced, summary.events_consumed, summary.events_lost)
    assert produced == (40, 40, 0)
    assert summary.policy_versions_applied == [1, 2]
    assert summary.swap_ms_max == 2.5
    assert summary.tok_per_s == {"A agentic": 30.0, "B conversation": 30.0}
    assert summary.arm_shares["A agentic"] == {"cache": 0.75, "model": 0.0, "none": 0.25}
    assert summary.mae == {"A agentic": 2.0, "B conversation": 2.0}
    assert summary.labels == {"verified": 40}
    assert summary.failings == []


def test_events_that_the_learner_had_before_do_not_count() -> None:
    ledger = recorded()
    ledger.add_status(learner_status(111.0, 1040))
    assert summarise(ledger, "a machine", 100.0, consumed_before=1000).events_lost == 0


@pytest.mark.parametrize(
    ("ledger", "word"),
    [
        (recorded(lost=3), "3 events were lost"),
        (recorded(versions=(0, 0)), "no policy of the registry"),
        (Ledger(WORKER), "made no events"),
    ],
)
def test_what_fails_a_run(ledger: Ledger, word: str) -> None:
    assert any(word in failing for failing in summary_of(ledger).failings)


def test_the_report_is_one_page_that_needs_no_other_file(tmp_path) -> None:
    ledger = recorded()
    summary = summary_of(ledger)
    page = report.write(ledger, summary, 100.0, tmp_path)
    text = page.read_text()
    assert "data:image/png;base64,iVBOR" in text
    assert "http" not in text.replace("HTTP", "")
    assert "A agentic" in text
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["ok"] is True
    assert written["events_produced"] == 40
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_saw_nothing_still_gets_its_report(tmp_path) -> None:
    ledger = Ledger(WORKER)
    page = report.write(ledger, summary_of(ledger), 100.0, tmp_path)
    assert "no events" in page.read_text()


def test_the_terminal_shows_a_run_at_every_stage() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    for ledger in (Ledger(WORKER), recorded()):
        console.print(dashboard.panel(ledger, 10.0))
        assert "10 s left" in dashboard.line(ledger, 10.0)
    console.print(dashboard.outcome(summary_of(recorded())))
    assert "B conversation" in console.export_text()
