"""``report.html``: curves and tables of a drift study on one page, in nothing but HTML and SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelines.drift.measure import Run
from pipelines.drift.scenario import PLAIN_US, Scenario

SMOOTH: Final = 25
"""Requests that a point of a curve is taken over."""
WIDTH, HEIGHT, LEFT, BELOW = 960, 300, 46, 26
COLOURS: Final = {
    "paper": "#b03030", "live": "#e08a00", "frozen": "#8a6d3b", "adaptive-frozen": "#c06ad0",
    "counting": "#999999", "first": "#3465c0", "adaptive": "#2a9d4a", "refit": "#222222",
}  # fmt: skip

Figures = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text cells, escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(head, "th") + "\n".join(line(r, "td") for r in rows) + "</table>"


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it."""
    return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def page(
    found: Sequence[Figures],
    runs: Sequence[tuple[Scenario, int, Mapping[str, Run]]],
    notices: Sequence[str],
) -> str:
    """The page of ``found`` and the ``runs`` behind it, which are of the same scenarios."""
    parts = [section("Rates after the change, as shares of the oracle's", overview(found))]
    for figures, (_, _, each) in zip(found, runs, strict=True):
        title = f"{figures['name']}, seed {figures['seed']}"
        parts.append(
            section(
                title,
                f"<p>{html.escape(figures['about'])}</p>",
                curves(each, figures),
                ratios(figures),
            )
        )
    if notices:
        parts.append(section("Left out", table(["what"], [[n] for n in notices])))
    return _PAGE.format(sections="\n".join(parts))


def overview(found: Sequence[Figures]) -> str:
    """A row for each scenario and seed, a column for each policy."""
    policies = list(dict.fromkeys(name for f in found for name in f["policies"]))
    shown = [name for name in policies if name != "oracle"]
    head = ["scenario", "seed", *shown, "oracle", "recovered in", "false alarms", "promotions"]
    rows = []
    for f in found:
        shares = (f["policies"].get(name, {}).get("oracle_fraction_after") for name in shown)
        best = f["policies"].get("oracle", {}).get("rate_after")
        rows.append(
            [
                f["name"],
                str(f["seed"]),
                *("-" if share is None else f"{share:.3f}" for share in shares),
                "-" if best is None else f"{best:.2f}",
                ", ".join("never" if n is None else str(n) for n in f.get("recovery_requests", [])),
                str(f.get("false_alarms", "-")),
                str(len(f.get("promotions", []))),
            ]
        )
    return table(head, rows)


def ratios(figures: Figures) -> str:
    """Ratios of rates with their intervals."""
    rows = [
        [pair, *(_interval(by_window.get(w)) for w in ("all", "after", "late"))]
        for pair, by_window in figures["ratios"].items()
    ]
    return table(["rates of", "all requests", "after the change", "150 after it"], rows)


def _interval(values: Sequence[float] | None) -> str:
    return "-" if values is None else "{:.3f} ({:.3f}-{:.3f})".format(*values)


def smoothed(run: Run) -> NDArray[np.float64]:
    """Rate over the last ``SMOOTH`` requests at each request [n], tokens a plain step."""
    tokens, us = np.cumsum([0, *run.tokens]), np.cumsum([0.0, *run.us])
    ends = np.arange(1, len(tokens))
    begins = np.maximum(ends - SMOOTH, 0)
    made: NDArray[np.float64] = (
        PLAIN_US * (tokens[ends] - tokens[begins]) / np.maximum(us[ends] - us[begins], 1e-9)
    )
    return made


def curves(runs: Mapping[str, Run], figures: Figures) -> str:
    """Rates over requests as an SVG: shares of the oracle's where that was run."""
    lines = {name: smoothed(run) for name, run in runs.items() if name != "oracle"}
    if not lines:
        return ""
    if "oracle" in runs:
        best = np.maximum(smoothed(runs["oracle"]), 1e-9)
        lines = {name: line / best for name, line in lines.items()}
    n = len(next(iter(lines.values())))
    low = min(float(line[SMOOTH // 2 :].min(initial=1.0)) for line in lines.values())
    high = max(float(line[SMOOTH // 2 :].max(initial=0.0)) for line in lines.values())
    span = max(high - low, 1e-6)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT) * at / max(n - 1, 1)

    def y(value: float) -> float:
        return (HEIGHT - BELOW) * (1.0 - (min(max(value, low), high) - low) / span)

    drawn = [
        f'<line x1="{x(c["at"]):.1f}" x2="{x(c["at"]):.1f}" y1="0" y2="{HEIGHT - BELOW}" '
        f'stroke="#bbb"/><text x="{x(c["at"]) + 3:.1f}" y="12">{html.escape(", ".join(c["what"]))}'
        "</text>"
        for c in figures["changes"]
    ]
    for share in np.linspace(low, high, 5).tolist():
        drawn.append(f'<text x="0" y="{y(share) + 4:.1f}">{share:.2f}</text>')
    for at in np.linspace(0, n - 1, 6).astype(int).tolist():
        drawn.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 4}" text-anchor="end">{at}</text>')
    for name, line in lines.items():
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(line.tolist()))
        colour = COLOURS.get(name, "#555")
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    for at in figures.get("promotions", []):
        drawn.append(f'<circle cx="{x(at):.1f}" cy="{HEIGHT - BELOW}" r="3" fill="#2a9d4a"/>')
    legend = " ".join(
        f'<span style="color:{COLOURS.get(name, "#555")}">&#9632; {html.escape(name)}</span>'
        for name in lines
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11">{"".join(drawn)}</svg>'
        f"<p>{legend} &#9679; promotion</p>"
    )


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What learning is worth</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }}
td, th {{ border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: left }}
svg {{ width: 100% }}
</style></head><body>
<h1>What learning is worth</h1>
<p>Rates are tokens in the time of a plain step, over the last 25 requests; every policy decoded the
same requests.</p>
{sections}
</body></html>
"""
