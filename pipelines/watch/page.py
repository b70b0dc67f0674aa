"""A page about a running or a finished service: its gain over alternatives, over all and by phase.
It makes the figures as JSON, and the HTML that draws them.

The page needs no network: it includes Plotly's script from its wheel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import CHAMPION, FIRST
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX, Round
from learner.evaluation.effect import WALL, WIDTH, Effect, effect_in, effect_of, pair_of
from pipelines.watch.ledger import ARMS, Ledger, Phase

POINTS: Final = 80
MIN_WINDOW_S: Final = 12.0
COLOURS: Final = {
    **{"cache": "#2a9d4a", "model": "#4a7bd0", "none": "#999999"},
    **{"plain": "#e07b39", "suffix": "#8e6bbf", "first": "#2a9d8f"},
    **{"phase": "#888888", "policy": "#e0a000", "alarm": "#d04848"},
}

Record = dict[str, Any]

NAMES: Final[Mapping[str, str]] = {
    PLAIN: "plain decoding",
    SUFFIX: "stock suffix decoding",
    MODEL: "EAGLE3 decoding",
    FIRST: "the frozen first policy",
}
"""Variants to compare the serving policy with, and their names."""
FIXED: Final = (PLAIN, SUFFIX, MODEL)  # those that are fixed methods
ALL: Final = "(all)"


def is_bounded(one: Effect) -> bool:
    """Whether there are enough pairs for an interval."""
    return one.low > 0.0 and math.isfinite(one.high)


def as_dict(one: Effect) -> dict[str, float | int | None]:
    """JSON-ready: ``ratio``, ``low``, ``high`` and ``pairs``; unknown figures are null."""
    bounds = {"low": round(one.low, 4), "high": round(one.high, 4)} if is_bounded(one) else {}
    ratio = round(one.ratio, 4) if one.pairs else None
    return {"ratio": ratio, "low": None, "high": None, "pairs": one.pairs} | bounds


def as_text(one: Effect) -> str:
    """``1.62 (1.51 to 1.74)``; "about" and the ratio without an interval, "-" without any pair."""
    if is_bounded(one):
        return f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
    return f"about {one.ratio:.2f}" if one.pairs else "-"


def compared(rounds: Sequence[Round]) -> list[str]:
    """Those of :data:`NAMES` that took part; plain decoding if none did."""
    played = {block.side for one in rounds for block in one.blocks}
    return [side for side in NAMES if side in played] or [PLAIN]


def by_kind(rounds: Sequence[Round], phases: Iterable[Phase]) -> dict[str, list[Round]]:
    """Rounds that ended in phases of each kind, and :data:`ALL`."""
    parts: dict[str, list[Round]] = {}
    for phase in phases:
        ended = [one for one in rounds if phase.began <= one.time < phase.ended]
        parts.setdefault(phase.kind, []).extend(ended)
    return {**parts, ALL: list(rounds)}


def uplifts(
    rounds: Sequence[Round], phases: Iterable[Phase], at_end: bool = False
) -> dict[str, dict[str, Effect]]:
    """The ratio of wall-clock rates to each variant, for each of :func:`by_kind`.

    Args:
        at_end: whether the run's length did not depend on the rounds
            (:func:`learner.evaluation.effect.effect`).
    """
    sides = compared(rounds)
    return {
        kind: {side: effect_of(part, CHAMPION, side, at_end) for side in sides}
        for kind, part in by_kind(rounds, phases).items()
    }


def best_and_worst(sides: Mapping[str, Effect]) -> tuple[str, str] | None:
    """The fastest and the slowest of the fixed methods; None if fewer than two have enough
    pairs."""
    known = {s: e.ratio for s, e in sides.items() if s in FIXED and is_bounded(e)}
    if len(known) < 2:
        return None
    return min(known, key=known.__getitem__), max(known, key=known.__getitem__)


def rate_of(rounds: Iterable[Round]) -> float:
    """Tokens a second of the champion in its blocks, by wall clock; 0 without any."""
    blocks = [block for one in rounds if (block := one.block(CHAMPION))]
    return 1e6 * sum(b.tokens for b in blocks) / max(sum(b.us for b in blocks), 1.0)


def over_time(rounds: Sequence[Round], side: str) -> list[tuple[float, Effect]]:
    """The ratio to ``side`` as known at up to :data:`POINTS` times, oldest first."""
    pairs = [(r.time, pair_of(r.block(CHAMPION), r.block(side))) for r in rounds]
    both = [(time, pair) for time, pair in pairs if pair]
    numbers = np.array([pair for _, pair in both]).reshape(-1, WIDTH)
    ends = reversed(range(len(both), 0, -max(1, math.ceil(len(both) / POINTS))))
    return [(both[end - 1][0], effect_in(numbers[:end], WALL)) for end in ends]


def shares_of(cycles: Mapping[str, int]) -> dict[str, float]:
    """Shares of :data:`ARMS`; all 0 without decisions."""
    return {arm: cycles[arm] / max(sum(cycles[arm] for arm in ARMS), 1) for arm in ARMS}


def charts(ledger: Ledger, began: float, ended: float) -> list[Record]:
    """All charts from ``began`` to ``ended``, seconds since the epoch. ``marks`` are vertical lines
    at changes; a chart without data ``is_empty``."""
    span = {"type": "date", "tickformat": "%H:%M:%S", "range": [_clock(began), _clock(ended)]}
    x = {"title": {"text": f"time of day ({datetime.now().astimezone():%Z})"}, **span}
    marks, ratios, shares = (of(ledger, began, ended) for of in (_marks, _ratios, _shares))

    def chart(name: str, title: str, note: str, y: Record, data: list[Record]) -> Record:
        described = {"id": name, "title": title, "note": note, "data": data, "marks": marks}
        is_empty = not any(sum(one["y"]) for one in data if one.get("hoverinfo") != "skip")
        return described | {"is_empty": is_empty, "layout": {"xaxis": x, "yaxis": y}}

    ratio = (
        "Tokens a second of the serving policy over each alternative's, from interleaved blocks of "
        "steps on the same requests. The band is a 95% confidence sequence. Click a name to show "
        "it. The axis is logarithmic."
    )
    arms = "What a cycle verified: a cache draft, a model draft, or none."
    return [
        chart("ratio", "Gain over each alternative", ratio, _ratio_axis(ratios), ratios),
        chart("arms", "Arms", arms, {"title": {"text": "% of cycles"}}, shares),
    ]


def _clock(time: float) -> str:
    """Local date and time of ``time``, seconds since the epoch, for an axis."""
    return datetime.fromtimestamp(time).isoformat(timespec="milliseconds")


def _line(name: str, points: Sequence[tuple[float, float]], colour: str, width: float) -> Record:
    x, y = [_clock(t) for t, _ in points], [round(value, 4) for _, value in points]
    line = {"color": colour, "width": width}
    return {"type": "scatter", "mode": "lines", "name": name, "line": line, "x": x, "y": y}


def _shares(ledger: Ledger, began: float, ended: float) -> list[Record]:
    width = max(MIN_WINDOW_S, (ended - began) / POINTS)
    times = np.arange(began + width / 2, ended, width / 2).tolist()
    seen = [(t, shares_of(ledger.sums(t - width / 2, t + width / 2))) for t in times]
    return [
        _line(arm, [(t, 100.0 * shares[arm]) for t, shares in seen], COLOURS[arm], 2)
        | {"stackgroup": "arms"}
        for arm in ARMS
    ]


def _marks(ledger: Ledger, began: float, ended: float) -> list[Record]:
    marks = [("phase", p.began, p.name) for p in ledger.phases]
    marks += [("policy", at, ledger.named(v)) for at, v in ledger.policy_switches()]
    marks += [("alarm", at, "alarm") for at in ledger.alarms()]
    return [
        {"kind": kind, "x": _clock(max(at, began)), "text": text, "colour": COLOURS[kind]}
        for kind, at, text in marks
        if began - 5.0 <= at <= ended
    ]


TICKS: Final = (0.1, 0.2, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0)
"""Ticks of the ratios' axis, which ends at the first and the last."""


def _ratio_axis(ratios: Sequence[Record]) -> Record:
    """A logarithmic axis for all ratios, shown or not. Outliers are cut: one stalled block among
    the first would stretch it beyond use."""
    low, high = np.quantile([y for one in ratios for y in one["y"]], (0.05, 0.95))
    ends = np.log10(np.clip([min(low, TICKS[3]), max(high, TICKS[5])], TICKS[0], TICKS[-1]))
    ticks = {"tickmode": "array", "tickvals": [*TICKS], "ticktext": [f"{tick:g}" for tick in TICKS]}
    return {"title": {"text": "ratio"}, "type": "log", "range": ends.tolist(), **ticks}


def _ratios(ledger: Ledger, began: float, ended: float) -> list[Record]:
    even = _line("even", [(began, 1.0), (ended, 1.0)], COLOURS["none"], 1)
    data = [even | {"showlegend": False, "hoverinfo": "skip"}]
    rounds = ledger.own_rounds
    for side in compared(rounds):
        points = over_time(rounds, side)
        bounded = [(t, e) for t, e in points if is_bounded(e)]
        band = [(t, e.low) for t, e in bounded] + [(t, e.high) for t, e in reversed(bounded)]
        label, colour = f"over {NAMES[side]}", COLOURS[side]
        filled = {"fill": "toself", "fillcolor": colour, "opacity": 0.22, "hoverinfo": "skip"}
        legend = {"legendgroup": side, "visible": True if side == PLAIN else "legendonly"}
        data += [
            _line(label, band, colour, 0) | filled | {"showlegend": False} | legend,
            _line(label, [(t, e.ratio) for t, e in points], colour, 3) | legend,
        ]
    return data


TEMPLATE: Final = Path(__file__).with_name("page.html")
SHORTEST_S: Final = 60.0


def record(
    ledger: Ledger,
    title: str,
    sentences: Sequence[Record] = (),
    nothing: str = "Nothing was seen.",
) -> Record:
    """The page's content, JSON-ready. All its strings are shown as text.

    Args:
        sentences: as those of :func:`pipelines.watch.live.sentences`.
        nothing: shown in place of an empty chart.
    """
    rounds = ledger.own_rounds
    gains = uplifts(rounds, ledger.phases, bool(ledger.phases))  # a fixed length, tested once
    times = [*(s.time for s in ledger.statuses), *(r.time for r in rounds)] or [time.time()]
    began, ended = min(times), max(times)
    if ledger.phases:
        began, ended = ledger.phases[0].began, min(ended, ledger.phases[-1].ended)
    tables = [
        _ratio_table(gains, by_kind(rounds, ledger.phases)),
        _calibration_table(ledger),
        _version_table(ledger),
    ]
    return {
        "title": title,
        "sentences": [*sentences],
        "made": f"{datetime.now().astimezone():%F %T %Z}",
        "nothing": nothing,
        "tiles": [_tile(side, whole) for side, whole in gains[ALL].items()],
        "charts": charts(ledger, began, max(ended, began + SHORTEST_S)),
        "tables": [table for table in tables if table["rows"]],
    }


def render(figures: Record, live: bool = False) -> str:
    """The HTML page of a :func:`record`; a ``live`` one polls its server."""
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(figures=figures, live=live, plotly=get_plotlyjs())


def _tile(side: str, whole: Effect) -> Record:
    value = f"{whole.ratio:.2f}" if is_bounded(whole) else "-"
    pairs = f"{whole.pairs} pair{'s' * (whole.pairs > 1)} of blocks"
    detail = f"{as_text(whole)}, {pairs}" if whole.pairs else "not compared"
    return {"id": f"over_{side}", "label": f"over {NAMES[side]}", "value": value, "detail": detail}


def _ratio_table(
    gains: Mapping[str, Mapping[str, Effect]], parts: Mapping[str, Sequence[Round]]
) -> Record:
    sides = [*gains[ALL]]
    rows = []
    for name, one in gains.items():
        ends = [NAMES[side] for side in best_and_worst(one) or ()] or ["not known", ""]
        rate = f"{rate_of(parts[name]):.1f}" if parts[name] else "-"
        rows.append([name, *(as_text(one[side]) for side in sides), *ends, rate])
    over = [f"over {NAMES[side]}" for side in sides]
    head = ["traffic", *over, "best fixed", "worst fixed", "tokens / s"]
    return {"title": "Ratio of tokens a second to each alternative", "head": head, "rows": rows}


def _calibration_table(ledger: Ledger) -> Record:
    spans = [(p.name, p.began, p.ended) for p in ledger.phases] or [(ALL, 0.0, math.inf)]
    rows = [
        [name, ledger.named(version), f"{one.drafts:,}", *(f"{n:.2f}" for n in astuple(one)[1:])]
        for name, began, ended in spans
        for version, one in sorted(ledger.calibration(began, ended).items())
    ]
    head = ["traffic", "version", "cache drafts", "predicted", "accepted", "mean error"]
    title = "Calibration: accepted tokens of a cache draft"
    return {"title": title, "head": head, "rows": rows}


def _version_table(ledger: Ledger) -> Record:
    events: list[tuple[float, str, str]] = []
    for p in ledger.published:
        if p.policy is None:
            events.append((p.time, "", f"role {p.role} has no policy any more"))
        else:
            share = f", a share of {p.policy.share:.0%}" if p.policy.share else ""
            what = f"published as {p.role} ({p.policy.kind}){share}"
            events.append((p.time, ledger.named(p.policy.version), what))
    switches = ledger.policy_switches()
    events += [(at, ledger.named(v), "serving on the worker") for at, v in switches]
    events += [(at, "", "the learner detected drift") for at in ledger.alarms()]
    events += [(at, "", what) for at, what in ledger.rollout_moves()]
    last = sorted(events, key=lambda event: event[0])[-60:]
    rows = [[f"{datetime.fromtimestamp(at):%F %T}", *cells] for at, *cells in last]
    return {"title": "Policy versions", "head": ["time of day", "version", "what"], "rows": rows}
