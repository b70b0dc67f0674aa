"""The figures of a demo, computed from its ledger; the names are those of ``summary.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from pipelines.watch.ledger import Ledger, Window
from pipelines.watch.uplift import NAMED, uplifts


@dataclass(frozen=True)
class Summary:
    """What a run came to. Shares are in 0..1, errors and accepted lengths in tokens, ratios of
    tokens a second with the bounds of their intervals."""

    date: str
    duration_s: float
    machine: str
    start: str  # what it began with: "first", the policy that ships, or "counting"
    requests: int
    requests_failed: int
    tokens: int
    uplift: dict[
        str, dict[str, Any]
    ]  # of each comparison that was made: see pipelines.watch.uplift
    rounds: int  # of the trial that compares them
    events_produced: int
    events_consumed: int
    events_lost: int
    events_seen: int  # by the demo's own consumer
    events_duplicate: int
    labels: dict[str, int]
    policy_versions_applied: list[int]  # of those that learning made
    policy_switches: list[dict[str, float]]
    policies_published: int
    swap_ms_max: float
    choose_us_p50: float
    phases: list[dict[str, Any]]
    tok_per_s: dict[str, float]  # all sides together
    arm_shares: dict[str, dict[str, float]]
    accepted_by_arm: dict[str, dict[str, float]]
    mae: dict[str, float | None]
    candidates: int
    promotions: int
    drifts: int
    worker_faults: int
    refusals: dict[str, int]
    records_refused: int  # that kept no contract

    @property
    def failings(self) -> list[str]:
        """What went wrong; empty where nothing did."""
        wrong = {
            "requests failed": self.requests_failed,
            "events were lost between worker and learner": self.events_lost,
            "faults of the worker were spared the engine: see its log": self.worker_faults,
            "records kept no contract": self.records_refused,
        }
        made_none = [] if self.events_produced else ["the worker made no events"]
        return made_none + [f"{count} {what}" for what, count in wrong.items() if count]

    @property
    def notes(self) -> list[str]:
        """What was not shown, for want of time; no fault."""
        found = []
        if not self.policy_versions_applied:
            found.append(
                "Nothing that was learned in these minutes was shown to be better than what "
                "served, so that went on serving."
            )
        for name, one in self.uplift.items():
            if one["low"] is None or one["low"] <= 1.0 <= one["high"]:
                found.append(
                    f"Whether it is faster than {NAMED[name]} cannot be told from this run."
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with ``ok``, ``failings`` and ``notes``."""
        said = {"ok": not self.failings, "failings": self.failings, "notes": self.notes}
        return {**asdict(self), **said}


def summarise(
    ledger: Ledger, machine: str, began: float, consumed_before: int = 0, start: str = "first"
) -> Summary:
    """Compute the figures.

    Args:
        began: seconds since the epoch at which the traffic began.
        consumed_before: events the learner had taken in before that.
        start: what served before anything was learned.
    """
    windows: dict[str, Window] = {p.name: ledger.between(p.began, p.ended) for p in ledger.phases}
    last = ledger.statuses[-1] if ledger.statuses else None
    learner = ledger.learner[-1] if ledger.learner else None
    answered = [a for a in ledger.answers if not a.error]
    ended = max((p.ended for p in ledger.phases), default=began)
    consumed = ledger.consumed - consumed_before
    found = uplifts(ledger.rounds, ledger.phases)
    return Summary(
        date=datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        duration_s=round(ended - began, 1),
        machine=machine,
        start=start,
        requests=len(answered),
        requests_failed=len(ledger.answers) - len(answered),
        tokens=sum(a.tokens for a in answered),
        uplift={name: one.as_dict() for name, one in found.items()},
        rounds=len(ledger.rounds),
        events_produced=ledger.produced,
        events_consumed=consumed,
        events_lost=ledger.produced - consumed,
        events_seen=ledger.drafts.seen,
        events_duplicate=learner.events_duplicate if learner else 0,
        labels=dict(sorted(ledger.drafts.labels.items())),
        policy_versions_applied=ledger.learned_versions(),
        policy_switches=[
            {"at_s": round(time - began, 1), "version": version}
            for time, version in ledger.policy_switches()
        ],
        policies_published=sum(p.version is not None for p in ledger.published),
        swap_ms_max=round(max((s.swap_ms_max for s in ledger.statuses), default=0.0), 3),
        choose_us_p50=round(last.choose_us_p50, 1) if last else 0.0,
        phases=[
            {
                "name": p.name,
                "workloads": list(p.workloads),
                "from_s": round(p.began - began, 1),
                "to_s": round(p.ended - began, 1),
                "events": windows[p.name].events,
            }
            for p in ledger.phases
        ],
        tok_per_s={name: round(w.tok_per_s, 2) for name, w in windows.items()},
        arm_shares={name: _rounded(w.arm_shares) for name, w in windows.items()},
        accepted_by_arm={name: _rounded(w.accepted_by_arm) for name, w in windows.items()},
        mae={name: None if w.mae is None else round(w.mae, 3) for name, w in windows.items()},
        candidates=learner.candidates if learner else 0,
        promotions=learner.promotions if learner else 0,
        drifts=learner.drifts if learner else 0,
        worker_faults=last.faults if last else 0,
        refusals=dict(last.refusals) if last else {},
        records_refused=ledger.refused,
    )


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
