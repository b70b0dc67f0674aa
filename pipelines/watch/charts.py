"""Charts of a page, each a record for Plotly: what is drawn, without colours of paper or ink.

Times are the clock of the machine that makes them, as Plotly reads them: the browser converts
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np

from decoder.contracts.trials import PLAIN
from pipelines.watch.drafts import ARMS
from pipelines.watch.ledger import Ledger
from pipelines.watch.uplift import NAMES, RECENT, compared, is_bounded, over_time

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
    width = max(MIN_WINDOW_S, (ended - began) / POINTS)
    centres = np.arange(began + width / 2, ended, width / 2).tolist()
    windows = ledger.drafts.windows([(t - width / 2, t + width / 2) for t in centres])
    times = [_clock(t) for t in centres]
    span = {"type": "date", "tickformat": "%H:%M:%S", "range": [_clock(began), _clock(ended)]}
    marks = _marks(ledger, began, ended)
    even: Record = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    even["line"] = {"color": COLOURS["none"], "width": 1}

    def timeline(
        name: str, title: str, note: str, data: list[Record], y: str, *shapes: Record, **yaxis: Any
    ) -> Record:
        made = _chart(name, title, note, data, f"time of day ({zone()})", y)
        made["layout"]["xaxis"] |= span
        made["layout"]["yaxis"] |= yaxis
        made["layout"]["shapes"] = [*marks, *shapes]
        return made

    shares = [[100.0 * w.arm_shares[arm] for w in windows] for arm in ARMS]
    stacked = [
        _line(arm, times, y, COLOURS[arm], width=0.5) | {"stackgroup": "arms"}
        for arm, y in zip(ARMS, shares, strict=True)
    ]
    accepted = [
        _line(
            f"{arm} draft",
            times,
            [w.accepted_by_arm[arm] if w.arm_shares[arm] else None for w in windows],
            COLOURS[arm],
        )
        for arm in ("cache", "model")
    ]
    ratio_note = (
        "Tokens a second of the policy in force, over those of the other side, from blocks of "
        "steps played in turn on the same requests. The band holds with 95% at all times at once; "
        f"the dotted line goes by the last {RECENT} pairs. Click a name to see the others."
    )
    arms_note = "What a cycle verified: a draft copied from the cache, one of the model, or none."
    took = "Draft tokens that the target took, for each cycle that verified such a draft."
    worth = "What the service is worth"
    return [
        timeline("ratio", worth, ratio_note, _ratios(ledger), "ratio", even),
        timeline("arms", "Arms", arms_note, stacked, "% of cycles", range=[0, 100]),
        timeline("accepted", "Acceptance", took, accepted, "tokens / cycle", rangemode="tozero"),
    ]


def _clock(time: float) -> str:
    """Local date and time of ``time``, seconds since the epoch, for an axis."""
    return datetime.fromtimestamp(time).isoformat(timespec="milliseconds")


def _chart(name: str, title: str, note: str, data: list[Record], x: str, y: str) -> Record:
    layout = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"id": name, "title": title, "note": note, "data": data, "layout": layout}


def _line(
    name: str, x: Sequence[Any], y: Sequence[float | None], colour: str, **line: Any
) -> Record:
    values = [None if value is None else round(value, 4) for value in y]
    line = {"color": colour, "width": 2, **line}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": values, "line": line}


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


def _ratios(ledger: Ledger) -> list[Record]:
    data: list[Record] = []
    rounds = [r for r in list(ledger.rounds) if r.scope == ledger.scope]
    for side in compared(rounds):
        points = over_time(rounds, side, POINTS)
        bounded = [(t, e) for t, e in points if is_bounded(e)]
        band = [(t, e.low) for t, e in bounded] + [(t, e.high) for t, e in reversed(bounded)]
        lately = [(t, e.ratio) for t, e in over_time(rounds, side, POINTS, RECENT) if e.pairs >= 6]
        label, colour = f"over {NAMES[side]}", COLOURS[side]
        filled = {"fill": "toself", "fillcolor": colour, "opacity": 0.22, "hoverinfo": "skip"}
        shown = {"legendgroup": side, "visible": True if side == PLAIN else "legendonly"}
        so_far = ((t, e.ratio) for t, e in points)
        data += [
            _points(label, band, colour, width=0) | filled | {"showlegend": False} | shown,
            _points(f"{label}, so far", so_far, colour, width=3) | shown,
            _points(f"{label}, lately", lately, colour, width=1.5, dash="dot") | shown,
        ]
    return data


def _points(name: str, points: Iterable[tuple[float, float]], colour: str, **line: Any) -> Record:
    pairs = list(points)
    return _line(name, [_clock(t) for t, _ in pairs], [y for _, y in pairs], colour, **line)
