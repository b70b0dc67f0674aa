"""Charts of a page, each a record for Plotly: what is drawn, without colours of paper or ink.

Times are the clock of the machine that makes them, as Plotly reads them: the browser converts
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.features import FloatArray
from decoder.policy.estimate import predict
from pipelines.watch.calibration import calibration
from pipelines.watch.drafts import ARMS
from pipelines.watch.ledger import Ledger, Window
from pipelines.watch.uplift import NAMED, RECENT, compared, course, is_bounded

POINTS: Final = 80
MIN_WINDOW_S: Final = 12.0
TENTHS: Final = 10
COLOURS: Final = {
    **{"cache": "#2a9d4a", "model": "#4a7bd0", "none": "#999999"},
    **{"over_plain": "#e07b39", "over_suffix": "#8e6bbf", "over_first_policy": "#2a9d8f"},
    **{"phase": "#888888", "policy": "#e0a000", "alarm": "#d04848", "line": "#4a7bd0"},
}

Record = dict[str, Any]


def clock(time: float) -> str:
    """Local date and time of ``time``, seconds since the epoch, for an axis."""
    return datetime.fromtimestamp(time).isoformat(timespec="milliseconds")


def zone() -> str:
    """Name of the clock's zone."""
    return datetime.now().astimezone().tzname() or "local time"


def charts(ledger: Ledger, began: float, ended: float) -> list[Record]:
    """All charts from ``began`` to ``ended``, seconds since the epoch."""
    width = max(MIN_WINDOW_S, (ended - began) / POINTS)
    centres = np.arange(began + width / 2, ended, width / 2)
    windows = [ledger.between(t - width / 2, t + width / 2) for t in centres.tolist()]
    times = [clock(t) for t in centres.tolist()]
    marks = _marks(ledger, began, ended)
    return [
        _ratio(ledger, marks),
        _arms(times, windows, marks),
        _accepted(times, windows, marks),
        _calibration(ledger),
        _costs(ledger),
    ]


def chart(
    name: str, title: str, note: str, data: list[Record], x: str, y: str, **layout: Any
) -> Record:
    """A chart as the page draws it; ``layout`` is Plotly's, in the place of what stands here."""
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"id": name, "title": title, "note": note, "data": data, "layout": {**axes, **layout}}


def _over_time(
    name: str, title: str, note: str, data: list[Record], y: str, marks: Record, **more: Any
) -> Record:
    made = chart(name, title, note, data, f"time of day ({zone()})", y, **marks)
    made["layout"]["xaxis"] |= {"type": "date", "tickformat": "%H:%M:%S", "range": marks["range"]}
    del made["layout"]["range"]
    made["layout"]["yaxis"] |= more
    return made


def _marks(ledger: Ledger, began: float, ended: float) -> Record:
    """Upright lines where something changed, each kind with its name above or below."""
    found: list[tuple[float, str, str, float]] = []
    found += [(p.began, p.name, "phase", 1.0) for p in ledger.phases]
    found += [(at, f"v{v}", "policy", 0.93) for at, v in ledger.policy_switches()]
    found += [(at, "alarm", "alarm", 0.07) for at in ledger.alarms()]
    shapes, labels = [], []
    for at, label, kind, height in found:
        if not began - 5.0 <= at <= ended:
            continue
        x = clock(max(at, began))
        dash = "solid" if kind == "phase" else "dot"
        line = {"color": COLOURS[kind], "width": 1, "dash": dash}
        shapes.append(
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        )
        labels.append(
            {
                **{"x": x, "y": height, "yref": "paper", "text": label, "showarrow": False},
                **{"xanchor": "left", "yanchor": "bottom" if kind == "phase" else "middle"},
                "font": {"size": 11, "color": COLOURS[kind]},
            }
        )
    return {"shapes": shapes, "annotations": labels, "range": [clock(began), clock(ended)]}


def _ratio(ledger: Ledger, marks: Record) -> Record:
    data: list[Record] = []
    rounds = [r for r in list(ledger.rounds) if r.scope == ledger.scope]
    for name, side in compared(rounds).items():
        points = course(rounds, side, POINTS)
        bounded = [(t, e) for t, e in points if is_bounded(e)]
        ends = [(t, e.low) for t, e in bounded] + [(t, e.high) for t, e in reversed(bounded)]
        colour, label = COLOURS[name], f"over {NAMED[name]}"
        shown = True if name == "over_plain" else "legendonly"
        common = {"type": "scatter", "mode": "lines", "legendgroup": name, "visible": shown}
        data.append(
            {
                **common,
                **_points(ends),
                **{"fill": "toself", "fillcolor": colour, "opacity": 0.22, "hoverinfo": "skip"},
                **{"line": {"width": 0}, "showlegend": False},
            }
        )
        data.append(
            {
                **common,
                **_points((t, e.ratio) for t, e in points),
                **{"name": f"{label}, so far", "line": {"color": colour, "width": 3}},
            }
        )
        moving = [(t, e.ratio) for t, e in course(rounds, side, POINTS, RECENT) if e.pairs >= 6]
        thin = {"color": colour, "width": 1.5, "dash": "dot"}
        data.append({**common, **_points(moving), "name": f"{label}, lately", "line": thin})
    note = (
        "Tokens a second of the policy in force, over those of the other side, from blocks of "
        "steps played in turn on the same requests. The band holds with 95% at all times at once; "
        f"the dotted line goes by the last {RECENT} pairs. Click a name to see the others."
    )
    even = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    line = {"color": COLOURS["none"], "width": 1}
    marked = {**marks, "shapes": [*marks["shapes"], {**even, "line": line}]}
    return _over_time("ratio", "What the service is worth", note, data, "ratio", marked)


def _points(points: Iterable[tuple[float, float]]) -> Record:
    pairs = list(points)
    return {"x": [clock(t) for t, _ in pairs], "y": [round(y, 4) for _, y in pairs]}


def _arms(times: list[str], windows: Sequence[Window], marks: Record) -> Record:
    data = [
        {
            **_line(arm, times, [100.0 * w.arm_shares[arm] for w in windows], COLOURS[arm]),
            **{"stackgroup": "arms", "line": {"width": 0.5, "color": COLOURS[arm]}},
        }
        for arm in ARMS
    ]
    note = "What a cycle verified: a draft copied from the cache, one of the model, or none."
    return _over_time("arms", "Arms", note, data, "% of cycles", marks, range=[0, 100])


def _accepted(times: list[str], windows: Sequence[Window], marks: Record) -> Record:
    def taken(arm: str) -> list[float | None]:
        return [w.accepted_by_arm[arm] if w.arm_shares[arm] else None for w in windows]

    data = [_line(f"{arm} draft", times, taken(arm), COLOURS[arm]) for arm in ("cache", "model")]
    note = "Draft tokens that the target took, for each cycle that verified such a draft."
    return _over_time(
        "accepted", "Acceptance", note, data, "tokens / cycle", marks, rangemode="tozero"
    )


def _line(name: str, x: list[str], y: Sequence[float | None], colour: str) -> Record:
    values = [None if value is None else round(value, 4) for value in y]
    line = {"color": colour, "width": 2}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": values, "line": line}


def _calibration(ledger: Ledger) -> Record:
    features, accepted = ledger.drafts.recent
    data: list[Record] = []
    for name, policy, colour in _judged(ledger):
        said, came, counts = tenths(policy, features, accepted)
        data.append(
            {
                **{"type": "scatter", "mode": "lines+markers", "name": name},
                **{"x": said, "y": came, "line": {"color": colour, "width": 2}},
                **{"text": [f"{n} drafts" for n in counts]},
            }
        )
    largest = max([1.0, *(max(d["x"] + d["y"], default=1.0) for d in data)])
    ideal = {"color": COLOURS["none"], "width": 1, "dash": "dash"}
    ends = [0.0, round(largest, 2)]
    data.append(
        {"type": "scatter", "mode": "lines", "name": "as foreseen", "x": ends, "y": ends}
        | {"line": ideal, "hoverinfo": "skip"}
    )
    note = (
        f"The last {len(accepted)} labelled drafts as each policy judges them, in tenths by what "
        "it foresees: the nearer to the dashed line, the better."
    )
    return chart(
        "calibration",
        "Calibration, before and after",
        note,
        data,
        "accepted length foreseen, tokens",
        "accepted length, tokens",
    )


def _judged(ledger: Ledger) -> list[tuple[str, Policy, str]]:
    """What served first and what serves now, named, if they are known and two."""
    switches = ledger.policy_switches()
    if not switches:
        return []
    first, last = switches[0][1], switches[-1][1]
    before = ledger.bundle(first)
    if before is None and ledger.statuses[0].policy_kind == "frequency":
        before = frequency_policy(ledger.scope)
    after = ledger.bundle(last) if last != first else None
    named = [(f"before: v{first}", before, "none"), (f"after: v{last}", after, "over_plain")]
    return [(name, policy, COLOURS[colour]) for name, policy, colour in named if policy]


def tenths(
    policy: Policy, features: FloatArray, accepted: FloatArray
) -> tuple[list[float], list[float], list[int]]:
    """Mean foreseen and mean accepted length of up to ten equal parts of the drafts, sorted by what
    ``policy`` foresees, and how many they are.

    Args:
        features: float32 [n, features].
        accepted: float32 [n], tokens.
    """
    if len(accepted) < 2 * TENTHS:
        return [], [], []
    said = predict(policy, features)
    parts = calibration(said, accepted, TENTHS)
    foreseen, came = ([round(part[name], 3) for part in parts] for name in ("foreseen", "came"))
    return foreseen, came, [int(part["n"]) for part in parts]


def _costs(ledger: Ledger) -> Record:
    last = ledger.statuses[-1] if ledger.statuses else None
    table = sorted((int(n), us / 1000.0) for n, us in (last.step_us if last else {}).items())
    x, y = [n for n, _ in table], [round(ms, 3) for _, ms in table]
    line = {"color": COLOURS["line"], "width": 2}
    data = [
        {"type": "scatter", "mode": "lines+markers", "name": "a step", "x": x, "y": y, "line": line}
    ]
    drafted = f"{last.draft_us / 1000.0:.2f} ms" if last and last.draft_us else "nothing"
    note = (
        "Time of a step by the tokens that it verifies, measured on this machine while it serves. "
        f"A model draft adds {drafted}."
    )
    return chart("costs", "Costs", note, data, "tokens in the step", "ms", showlegend=False)
