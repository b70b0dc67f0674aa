"""One page about a running or a finished service: figures as JSON, and the HTML that draws them.

It needs no network: Plotly's script comes from its wheel and is part of the page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.trials import Round
from decoder.trial.effect import Effect
from pipelines.watch.charts import charts, zone
from pipelines.watch.ledger import ARMS, Ledger
from pipelines.watch.uplift import ALL, NAMES, as_text, best_and_worst, rate_in, uplifts

TEMPLATE: Final = Path(__file__).with_name("page.html")
SHORTEST_S: Final = 60.0

LONGEST: Final = 60
"""Characters of a value of a status; what is longer is a table of its own kind."""

Record = dict[str, Any]


def record(
    ledger: Ledger,
    title: str,
    sentences: Sequence[str | Record] = (),
    facts: Mapping[str, str] | None = None,
    versions: str = "",
) -> Record:
    """What the page shows of ``ledger``, ready for JSON; all text of it is shown as text.

    Args:
        sentences: text, or records as :data:`pipelines.watch.now.Sentence`.
        facts: further figures by name.
        versions: address of MLflow's page of a version, but for its number; "" for none.
    """
    rounds = [r for r in list(ledger.rounds) if r.scope == ledger.scope]
    found = uplifts(rounds, ledger.phases)
    times = [*(s.time for s in ledger.statuses), *(r.time for r in rounds)] or [time.time()]
    began, ended = min(times), max(times)
    if ledger.phases:
        began, ended = ledger.phases[0].began, min(ended, ledger.phases[-1].ended)
    tables = [
        _choice_table(ledger, found),
        _ratio_table("Phases: ratios of tokens a second", "phase", found),
        _phase_table(ledger, rounds),
        _version_table(ledger, versions),
        _table("Figures", [], _facts(ledger, facts or {})),
    ]
    return {
        "title": title,
        "sentences": [{"text": s} if isinstance(s, str) else s for s in sentences],
        "made": f"{_moment(time.time())} {zone()}",
        "tiles": [_tile(side, whole) for side, whole in found[ALL].items()],
        "charts": charts(ledger, began, max(ended, began + SHORTEST_S)),
        "tables": [table for table in tables if table["rows"]],
    }


def render(figures: Record, live: bool = False) -> str:
    """The HTML page of a :func:`record`; a ``live`` one asks its server for newer ones."""
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(figures=figures, live=live, plotly=get_plotlyjs())


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Record:
    return {"title": title, "head": list(head), "rows": [list(row) for row in rows]}


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _tile(side: str, whole: Effect) -> Record:
    value = f"{whole.ratio:.2f}" if whole.pairs else "-"
    detail = f"{as_text(whole)}, {whole.pairs} pairs of blocks" if whole.pairs else "not played"
    return {"id": f"over_{side}", "label": f"over {NAMES[side]}", "value": value, "detail": detail}


def _ratio_table(title: str, head: str, rows: Mapping[str, Mapping[str, Effect]]) -> Record:
    sides = next(iter(rows.values()))
    cells = [[name, *map(as_text, one.values())] for name, one in rows.items()]
    return _table(title, [head, *(f"over {NAMES[side]}" for side in sides)], cells)


def _choice_table(ledger: Ledger, found: Mapping[str, Mapping[str, Effect]]) -> Record:
    head = ["phase", "best fixed method", "over it", "worst fixed method", "over it"]
    rows = []
    for phase in ledger.phases:
        ends = best_and_worst(found[phase.name])
        cells = [[NAMES[side], as_text(found[phase.name][side])] for side in ends or ()]
        rows.append([phase.name, *(cells[0] + cells[1] if cells else ["cannot tell", *("",) * 3])])
    return _table("Nobody has to choose", head, rows)


def _phase_table(ledger: Ledger, rounds: Sequence[Round]) -> Record:
    head = ["phase", "workloads", "tokens / s", *ARMS, "cache accepts", "error"]
    rows = []
    windows = ledger.drafts.windows([(p.began, p.ended) for p in ledger.phases])
    for phase, window in zip(ledger.phases, windows, strict=True):
        named = [phase.name, ", ".join(phase.workloads), f"{rate_in(phase, rounds):.1f}"]
        drafted = [f"{window.arm_shares[arm]:.0%}" for arm in ARMS]
        drafted += [f"{window.accepted_by_arm['cache']:.2f}"]
        rows.append([*named, *drafted, "-" if window.mae is None else f"{window.mae:.2f}"])
    return _table("Phases: what the policy in force did", head, rows)


def _version_table(ledger: Ledger, address: str) -> Record:
    events: list[tuple[float, int | None, str]] = []
    for p in ledger.published:
        if p.policy is None:
            events.append((p.time, None, f"no policy of role {p.role} any more"))
        else:
            share = f", a share of {p.policy.share:.0%}" if p.policy.share else ""
            what = f"published as {p.role} ({p.policy.kind}){share}"
            events.append((p.time, p.policy.version, what))
    events += [(at, v, "in force on the worker") for at, v in ledger.policy_switches()]
    events += [(at, None, "the learner says that the traffic changed") for at in ledger.alarms()]
    events += [(at, None, what) for at, what in ledger.rollout_moves()]
    rows: list[list[Any]] = []
    for at, version, what in sorted(events, key=lambda e: e[0])[-60:]:
        name = "" if version is None else f"v{version}"
        linked = {"text": name, "href": f"{address}{version}"}
        rows.append([_moment(at), linked if address and version else name, what])
    return _table("Policy versions", ["time of day", "version", "what"], rows)


def _facts(ledger: Ledger, more: Mapping[str, str]) -> list[list[str]]:
    facts, newest = dict[str, str](), 0.0
    last: list[WorkerStatus | LearnerStatus] = [*ledger.statuses[-1:], *ledger.learner[-1:]]
    for status in last:
        for name, value in status.model_dump().items():
            told = str(round(value, 3) if isinstance(value, float) else value or "")
            facts |= {f"{status.role}: {name}": told} if len(told) < LONGEST else {}
        newest = max(newest, status.time)
    facts["records that could not be read"] = str(ledger.refused or "")
    facts["newest status"] = f"{_moment(newest)} {zone()}" if newest else ""
    return [[name, value] for name, value in {**facts, **more}.items() if value]
