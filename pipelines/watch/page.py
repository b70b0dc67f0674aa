"""One page about a running or a finished service: figures as JSON, and the HTML that draws them.

It needs no network: Plotly's script comes from its wheel and is part of the page.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.trials import Round
from pipelines.watch.charts import charts, zone
from pipelines.watch.ledger import Ledger
from pipelines.watch.uplift import NAMED, Uplift, by_workload, compared, is_bounded, shown, uplifts

TEMPLATE: Final = Path(__file__).with_name("page.html")
SHORTEST_S: Final = 60.0

Record = dict[str, Any]


def record(
    ledger: Ledger,
    title: str,
    sentences: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    versions: str = "",
) -> Record:
    """What the page shows of ``ledger``, ready for JSON; all text of it is shown as text.

    Args:
        facts: further figures by name.
        versions: address of MLflow's page of a version, but for its number; "" for none.
    """
    rounds = [r for r in list(ledger.rounds) if r.scope == ledger.scope]
    found = uplifts(rounds, ledger.phases)
    began, ended = _span(ledger, rounds)
    tables = [
        _phase_table(ledger, found),
        _workload_table(rounds),
        _side_table(rounds),
        _version_table(ledger, versions),
        {"title": "Figures", "head": [], "rows": _facts(ledger, facts or {})},
    ]
    return {
        "title": title,
        "sentences": list(sentences),
        "made": f"{_day_time(time.time())} {zone()}",
        "tiles": [_tile(name, one) for name, one in found.items()],
        "charts": charts(ledger, began, ended),
        "tables": [table for table in tables if table["rows"]],
    }


def page(shown_now: Record, live: bool = False) -> str:
    """The HTML page of :func:`record`'s figures; a ``live`` one asks its server for newer ones."""
    text = TEMPLATE.read_text(encoding="utf-8")
    # "<" cannot end the script that holds the figures
    figures = json.dumps(shown_now, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "@TITLE@": html.escape(str(shown_now["title"])),
        "@LIVE@": json.dumps(live),
        "@FIGURES@": figures,
        "@PLOTLY@": _plotly(),
    }
    # all at once: what is put in may hold a mark itself, and it stays what it is
    return re.sub("|".join(parts), lambda mark: parts[mark.group()], text)


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _span(ledger: Ledger, rounds: Sequence[Round]) -> tuple[float, float]:
    times = [s.time for s in list(ledger.statuses)] + [r.time for r in rounds]
    ended = max(times, default=time.time())
    began = min(times, default=ended)
    if ledger.phases:
        began, last = ledger.phases[0].began, ledger.phases[-1].ended
        ended = min(max(ended, began), last)
    return began, max(ended, began + SHORTEST_S)


def _day_time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")


def _tile(name: str, one: Uplift) -> Record:
    whole = one.whole
    if not whole.pairs:
        return {"id": name, "label": f"over {NAMED[name]}", "value": "-", "detail": "not played"}
    bounded = f"95%: {whole.low:.2f} to {whole.high:.2f}"
    interval = bounded if is_bounded(whole) else "too few for an interval"
    return {
        "id": name,
        "label": f"over {NAMED[name]}",
        "value": f"{whole.ratio:.2f}",
        "detail": f"{interval}, {whole.pairs} pairs of blocks",
    }


def _phase_table(ledger: Ledger, found: Mapping[str, Uplift]) -> Record:
    head = ["phase", "from", "workloads", "tokens / s", *(f"over {NAMED[name]}" for name in found)]
    rows = []
    for phase in ledger.phases:
        window = ledger.between(phase.began, phase.ended)
        ratios = [shown(one.phases[phase.name]) for one in found.values()]
        workloads = ", ".join(phase.workloads)
        rows.append([phase.name, _time(phase.began), workloads, f"{window.tok_per_s:.1f}", *ratios])
    if rows:
        rows.append(["all", "", "", "", *(shown(one.whole) for one in found.values())])
        at_costs = [shown(one.at_costs) for one in found.values()]
        rows.append(["all, at the costs in force", "", "", "", *at_costs])
    return {"title": "Phases: ratios of tokens a second", "head": head, "rows": rows}


def _workload_table(rounds: Sequence[Round]) -> Record:
    head = ["workload", *(f"over {NAMED[name]}" for name in compared(rounds))]
    rows = [[name or "-", *map(shown, one.values())] for name, one in by_workload(rounds).items()]
    return {"title": "Workloads: the same at the costs in force", "head": head, "rows": rows}


def _side_table(rounds: Sequence[Round]) -> Record:
    head = ["side", "blocks", "steps", "tokens", "tokens / step", "tokens / s"]
    sums: dict[str, list[float]] = {}
    for block in (b for r in rounds for b in r.blocks):
        mine = sums.setdefault(block.side, [0.0] * 4)
        for i, value in enumerate((1, block.steps, block.tokens, block.us)):
            mine[i] += value
    rows = []
    for side, (blocks, steps, tokens, us) in sorted(sums.items()):
        counts = [f"{n:.0f}" for n in (blocks, steps, tokens)]
        rates = [f"{tokens / max(steps, 1.0):.2f}", f"{1e6 * tokens / max(us, 1.0):.1f}"]
        rows.append([side, *counts, *rates])
    return {"title": "Sides of the trial", "head": head, "rows": rows}


def _version_table(ledger: Ledger, address: str) -> Record:
    head = ["time of day", "version", "what"]
    events: list[tuple[float, int | None, str]] = []
    for p in ledger.published:
        if p.version is None:
            events.append((p.time, None, f"no policy of role {p.role} any more"))
        else:
            share = f", a share of {p.share:.0%}" if p.share else ""
            events.append((p.time, p.version, f"published as {p.role} ({p.kind}){share}"))
    events += [(at, v, "in force on the worker") for at, v in ledger.policy_switches()]
    events += [(at, None, "the learner says that the traffic changed") for at in ledger.alarms()]
    events += [(at, None, said) for at, said in ledger.moves()]
    rows: list[list[Any]] = []
    for at, version, what in sorted(events, key=lambda e: e[0])[-60:]:
        name = "" if version is None else f"v{version}"
        linked = {"text": name, "href": f"{address}{version}"}
        rows.append([_day_time(at), linked if address and version else name, what])
    return {"title": "Policy versions", "head": head, "rows": rows}


def _facts(ledger: Ledger, more: Mapping[str, str]) -> list[list[str]]:
    worker = ledger.statuses[-1] if ledger.statuses else None
    learner = ledger.learner[-1] if ledger.learner else None
    facts = {**(_worker_facts(worker) if worker else {})}
    facts |= _learner_facts(learner) if learner else {}
    if ledger.newest:
        facts["newest record"] = f"{_day_time(ledger.newest)} {zone()}"
    facts["labels"] = ", ".join(f"{n} {kind}" for kind, n in sorted(ledger.drafts.labels.items()))
    return [[name, value] for name, value in {**facts, **more}.items() if value]


def _worker_facts(worker: WorkerStatus) -> dict[str, str]:
    name, value = worker.parameter
    return {
        "worker": f"{worker.process}, scope {worker.scope}",
        "policy in force": f"v{worker.policy_version} ({worker.policy_kind}), {name} {value:.2f}",
        "floor": f"{worker.fallback} in force" if worker.fallback else "not needed",
        "draft events made": f"{worker.events_made}, of which {worker.events_dropped} dropped",
        "slowest policy swap": f"{worker.swap_ms_max:.1f} ms",
        "median time of a decision": f"{worker.choose_us_p50:.0f} µs a step",
        "rounds of the trial": f"{worker.rounds_made}, of which {worker.rounds_dropped} dropped",
        "faults": str(worker.faults),
    }


def _learner_facts(learner: LearnerStatus) -> dict[str, str]:
    return {
        "draft events learned from": f"{learner.events_consumed}, {learner.lag} records behind",
        "candidates": f"{learner.candidates}, of which {learner.promotions} promoted",
        "changes of traffic said by the learner": str(learner.drifts),
        "compared now": _compared(learner),
    }


def _compared(learner: LearnerStatus) -> str:
    if not learner.rollout:
        return ""
    known = f", {learner.trial_low:.2f} to {learner.trial_high:.2f}" if learner.trial_low else ""
    return (
        f"v{learner.trial_version} on {learner.rollout} with {learner.trial_share:.0%} of the "
        f"steps: {learner.trial_ratio:.2f} of the champion's rate{known}, from "
        f"{learner.trial_pairs} pairs"
    )
