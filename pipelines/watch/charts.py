"""Charts of a page, each a record for Plotly: what is drawn, without colours of paper or ink.

Times are the clock of the machine that makes them, as Plotly reads them: the browser converts
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

import numpy as np

from decoder.contracts.trials import PLAIN
from pipelines.watch.ledger import ARMS, Ledger
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
