"""What a running stack says in a terminal: a line while it runs, tables at its end."""

from __future__ import annotations

import time
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from decoder.contracts.status import WorkerStatus
from pipelines.demo.sentences import sentences
from pipelines.demo.summary import Summary
from pipelines.watch.drafts import ARMS
from pipelines.watch.ledger import Ledger
from pipelines.watch.uplift import NAMED, shown, uplifts

WINDOW_SECONDS: Final = 30.0


def _shown(value: float | None, unit: str = "", digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def line(ledger: Ledger, left: float) -> str:
    """The state of a run in one line of text."""
    now = time.time()
    window = ledger.between(now - WINDOW_SECONDS, now)
    phase = ledger.phases[-1].name if ledger.phases else "starting"
    worker = ledger.statuses[-1] if ledger.statuses else None
    learner = ledger.learner[-1] if ledger.learner else None
    over = uplifts(list(ledger.rounds), ())
    worth = ", ".join(f"over {NAMED[name]} {shown(one.whole)}" for name, one in over.items())
    shares = " ".join(f"{arm} {window.arm_shares[arm]:.0%}" for arm in ARMS)
    trial = (
        f" ({learner.rollout} of v{learner.trial_version})" if learner and learner.rollout else ""
    )
    return (
        f"{phase}: {worth}, "
        f"arms {shares}, cache accepts {window.accepted_by_arm['cache']:.1f}, "
        f"MAE {_shown(window.mae, digits=2)}, "
        f"policy v{worker.policy_version if worker else '-'}{trial} {_parameter(worker)}, "
        f"events {ledger.produced} made {ledger.consumed} learned from, "
        f"candidates {learner.candidates if learner else 0}, {left:.0f} s left"
    )


def _parameter(worker: WorkerStatus | None) -> str:
    if worker is None:
        return "no policy"
    name, value = worker.parameter
    fallen = f", floor: {worker.fallback}" if worker.fallback else ""
    return f"{name} {value:.2f}{fallen}"


def outcome(summary: Summary) -> RenderableType:
    """A finished run: ratios by phase, what else was measured, three sentences, and what could not
    be told."""
    names = list(summary.uplift)
    worth = Table("phase", *(f"over {NAMED[n]}" for n in names), box=None, padding=(0, 2))
    for phase in summary.tok_per_s:
        worth.add_row(phase, *(_ratio(summary.uplift[n]["phases"][phase]) for n in names))
    worth.add_row("all", *(f"[bold]{_ratio(summary.uplift[n])}[/bold]" for n in names))
    table = Table("phase", "tok/s", *ARMS, "cache accepts", "MAE", box=None, padding=(0, 2))
    for name, rate in summary.tok_per_s.items():
        shares = summary.arm_shares[name]
        table.add_row(
            name,
            f"{rate:.1f}",
            *(f"{shares[arm]:.0%}" for arm in ARMS),
            f"{summary.accepted_by_arm[name]['cache']:.2f}",
            _shown(summary.mae[name], digits=2),
        )
    events = (
        f"{summary.events_produced} draft events made, {summary.events_consumed} learned from, "
        f"{summary.events_lost} lost; learned policies in force: "
        f"{summary.policy_versions_applied}; slowest swap {summary.swap_ms_max:.1f} ms"
    )
    said = [Text(sentence) for sentence in (*sentences(summary), *summary.notes)]
    return Group(worth, Text(), table, Text(events), Text(), *said)


def _ratio(one: dict[str, Any]) -> str:
    if one["ratio"] is None:
        return "-"
    interval = "" if one["low"] is None else f" ({one['low']:.2f} to {one['high']:.2f})"
    return f"{one['ratio']:.2f}{interval}"
