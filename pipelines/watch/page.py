"""One page about a running or a finished service: figures as JSON, and the HTML that draws them.

It needs no network: Plotly's script comes from its wheel and is part of the page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.trials import PLAIN, Round
from decoder.trial.effect import Effect
from pipelines.watch.ledger import ARMS, Ledger
from pipelines.watch.uplift import (
    ALL,
    NAMES,
    RECENT,
    as_text,
    compared,
    is_bounded,
    over_time,
    rate_in,
    uplifts,
)

POINTS: Final = 80
MIN_WINDOW_S: Final = 12.0
COLOURS: Final = {
    **{"cache": "#2a9d4a", "model": "#4a7bd0", "none": "#999999"},
    **{"plain": "#e07b39", "suffix": "#8e6bbf", "first": "#2a9d8f"},
    **{"phase": "#888888", "policy": "#e0a000", "alarm": "#d04848"},
}

Record = dict[str, Any]


def zone() -> str:
    """Name of the clock's zone."""
    return datetime.now().astimezone().tzname() or "local time"


def charts(ledger: Ledger, began: float, ended: float) -> list[Record]:
    """All charts from ``began`` to ``ended``, seconds since the epoch."""
    span = {"type": "date", "tickformat": "%H:%M:%S", "range": [_clock(began), _clock(ended)]}
    x = {"title": {"text": f"time of day ({zone()})"}, **span}
    marks = _marks(ledger, began, ended)

    def chart(name: str, title: str, note: str, y: str, data: list[Record]) -> Record:
        layout = {"xaxis": x, "yaxis": {"title": {"text": y}}, "shapes": marks}
        return {"id": name, "title": title, "note": note, "data": data, "layout": layout}

    ratio = (
        "Tokens a second of the policy in force, over those of the other side, from blocks of "
        "steps played in turn on the same requests. The band holds with 95% at all times at once; "
        f"the dotted line goes by the last {RECENT} pairs. Click a name to see the others."
    )
    arms = "What a cycle verified: a draft copied from the cache, one of the model, or none."
    took = "Draft tokens that the target took, for each cycle that verified such a draft."
    shares, accepted = _drafts(ledger, began, ended)
    return [
        chart("ratio", "What the service is worth", ratio, "ratio", _ratios(ledger, began, ended)),
        chart("arms", "Arms", arms, "% of cycles", shares),
        chart("accepted", "Acceptance", took, "tokens / cycle", accepted),
    ]


def _clock(time: float) -> str:
    """Local date and time of ``time``, seconds since the epoch, for an axis."""
    return datetime.fromtimestamp(time).isoformat(timespec="milliseconds")


def _line(
    name: str, points: Iterable[tuple[float, float | None]], colour: str, **line: Any
) -> Record:
    pairs = list(points)
    values = [None if value is None else round(value, 4) for _, value in pairs]
    drawn = {"mode": "lines", "name": name, "line": {"color": colour, "width": 2, **line}}
    return {"type": "scatter", "x": [_clock(t) for t, _ in pairs], "y": values, **drawn}


def _drafts(ledger: Ledger, began: float, ended: float) -> tuple[list[Record], list[Record]]:
    """Lines of what was verified, and of what was accepted."""
    width = max(MIN_WINDOW_S, (ended - began) / POINTS)
    times = np.arange(began + width / 2, ended, width / 2).tolist()
    windows = ledger.drafts.windows([(t - width / 2, t + width / 2) for t in times])
    seen = list(zip(times, windows, strict=True))
    shares, accepted = [], []
    for arm in ARMS:
        stacked = _line(arm, ((t, 100.0 * w.arm_shares[arm]) for t, w in seen), COLOURS[arm])
        shares.append(stacked | {"stackgroup": "arms"})
        if arm != "none":
            took = ((t, w.accepted_by_arm[arm] if w.arm_shares[arm] else None) for t, w in seen)
            accepted.append(_line(f"{arm} draft", took, COLOURS[arm]))
    return shares, accepted


def _marks(ledger: Ledger, began: float, ended: float) -> list[Record]:
    """Upright lines where something changed, each kind with its name at another height."""
    found = [(p.began, p.name, "phase", "end") for p in ledger.phases]
    found += [(at, f"v{v}", "policy", "middle") for at, v in ledger.policy_switches()]
    found += [(at, "alarm", "alarm", "start") for at in ledger.alarms()]
    shapes = []
    for at, text, kind, place in found:
        if began - 5.0 <= at <= ended:
            x, colour = _clock(max(at, began)), COLOURS[kind]
            label = {"text": text, "textposition": place, "textangle": 0, "xanchor": "left"}
            label |= {"font": {"size": 11, "color": colour}}
            line = {"color": colour, "width": 1, "dash": "solid" if kind == "phase" else "dot"}
            ends = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
            shapes.append({"type": "line", "line": line, "label": label, **ends})
    return shapes


def _ratios(ledger: Ledger, began: float, ended: float) -> list[Record]:
    even = _line("even", [(began, 1.0), (ended, 1.0)], COLOURS["none"], width=1)
    data = [even | {"showlegend": False, "hoverinfo": "skip"}]
    rounds = [r for r in list(ledger.rounds) if r.scope == ledger.scope]
    for side in compared(rounds):
        points = over_time(rounds, side, POINTS)
        bounded = [(t, e) for t, e in points if is_bounded(e)]
        band = [(t, e.low) for t, e in bounded] + [(t, e.high) for t, e in reversed(bounded)]
        lately = [(t, e.ratio) for t, e in over_time(rounds, side, POINTS, RECENT) if e.pairs >= 6]
        label, colour = f"over {NAMES[side]}", COLOURS[side]
        filled = {"fill": "toself", "fillcolor": colour, "opacity": 0.22, "hoverinfo": "skip"}
        legend = {"legendgroup": side, "visible": True if side == PLAIN else "legendonly"}
        so_far = ((t, e.ratio) for t, e in points)
        data += [
            _line(label, band, colour, width=0) | filled | {"showlegend": False} | legend,
            _line(f"{label}, so far", so_far, colour, width=3) | legend,
            _line(f"{label}, lately", lately, colour, width=1.5, dash="dot") | legend,
        ]
    return data


TEMPLATE: Final = Path(__file__).with_name("page.html")
SHORTEST_S: Final = 60.0

LONGEST: Final = 60
"""Characters of a value of a status; what is longer is a table of its own kind."""


def record(
    ledger: Ledger,
    title: str,
    sentences: Sequence[str | Record] = (),
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Record:
    """What the page shows of ``ledger``, ready for JSON; all text of it is shown as text.

    Args:
        sentences: text, or records as :data:`pipelines.watch.live.Sentence`.
        facts: further figures by name.
    """
    rounds = [r for r in list(ledger.rounds) if r.scope == ledger.scope]
    found = uplifts(rounds, ledger.phases)
    times = [*(s.time for s in ledger.statuses), *(r.time for r in rounds)] or [time.time()]
    began, ended = min(times), max(times)
    if ledger.phases:
        began, ended = ledger.phases[0].began, min(ended, ledger.phases[-1].ended)
    tables = [
        _ratio_table("Phases: ratios of tokens a second", "phase", found),
        _phase_table(ledger, rounds),
        _version_table(ledger),
        _table("Figures", [], _facts(ledger, facts)),
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


def _version_table(ledger: Ledger) -> Record:
    events: list[tuple[float, str, str]] = []
    for p in ledger.published:
        if p.policy is None:
            events.append((p.time, "", f"no policy of role {p.role} any more"))
        else:
            share = f", a share of {p.policy.share:.0%}" if p.policy.share else ""
            what = f"published as {p.role} ({p.policy.kind}){share}"
            events.append((p.time, f"v{p.policy.version}", what))
    events += [(at, f"v{v}", "in force on the worker") for at, v in ledger.policy_switches()]
    events += [(at, "", "the learner says that the traffic changed") for at in ledger.alarms()]
    events += [(at, "", what) for at, what in ledger.rollout_moves()]
    rows = [[_moment(at), *told] for at, *told in sorted(events, key=lambda e: e[0])[-60:]]
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
