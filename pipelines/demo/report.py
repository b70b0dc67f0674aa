"""A demo on paper: ``summary.json``, curves over time as PNG, and one self-contained page."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipelines.demo.summary import Summary
from pipelines.watch.ledger import ARMS, Ledger

STEP_SECONDS: Final = 3.0
SMOOTH_SECONDS: Final = 12.0
COLOURS: Final = {"cache": "#2a9d4a", "model": "#3465c0", "none": "#999999"}


def write(ledger: Ledger, summary: Summary, began: float, folder: Path) -> Path:
    """Write the three files into ``folder``; the page's path.

    Args:
        began: seconds since the epoch that the time axis counts from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary.as_dict(), indent=1)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    plot(ledger, began, folder / "curves.png")
    picture = base64.b64encode((folder / "curves.png").read_bytes()).decode()
    page_path = folder / "report.html"
    page_path.write_text(page(summary, picture), encoding="utf-8")
    return page_path


def plot(ledger: Ledger, began: float, path: Path) -> None:
    """Throughput, arms, acceptance, predictor error and decision parameter over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ended = max((p.ended for p in ledger.phases), default=began)
    times = np.arange(began + SMOOTH_SECONDS / 2, max(ended, began + SMOOTH_SECONDS), STEP_SECONDS)
    half = SMOOTH_SECONDS / 2
    windows = [ledger.between(t - half, t + half) for t in times.tolist()]
    x = times - began
    figure, axes = plt.subplots(5, 1, figsize=(10, 12), sharex=True, constrained_layout=True)
    throughput, shares, accepted, error, threshold = axes
    throughput.plot(x, [w.tok_per_s for w in windows], color="black")
    throughput.set_ylabel("tokens / s")
    shares.stackplot(
        x,
        *([w.arm_shares[arm] for w in windows] for arm in ARMS),
        labels=ARMS,
        colors=[COLOURS[arm] for arm in ARMS],
        alpha=0.8,
    )
    shares.set_ylabel("share of cycles")
    shares.set_ylim(0, 1)
    shares.legend(loc="center left")
    for arm in ("cache", "model"):
        accepted.plot(x, [w.accepted_by_arm[arm] for w in windows], label=arm, color=COLOURS[arm])
    accepted.set_ylabel("accepted / cycle")
    accepted.legend(loc="upper left")
    error.plot(x, [np.nan if w.mae is None else w.mae for w in windows], color="#b03030")
    error.set_ylabel("predictor error\n(tokens, mean absolute)")
    reported = [
        (s.time - began, s.parameter[1]) for s in ledger.statuses if began <= s.time <= ended
    ]
    if reported:
        threshold.step(*zip(*reported, strict=True), where="post", color="black")
    threshold.set_ylabel("decision\nparameter")
    threshold.set_xlabel("seconds of traffic")
    threshold.set_xlim(0, max(ended - began, 1.0))
    _mark(ledger, began, ended, axes)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _mark(ledger: Ledger, began: float, ended: float, axes: Any) -> None:
    for phase in ledger.phases:
        for axis in axes:
            axis.axvline(phase.began - began, color="black", linewidth=1.2)
        label = f" {phase.name} ({', '.join(phase.workloads)})"
        where = axes[0].get_xaxis_transform()
        axes[0].text(phase.began - began, 1.03, label, transform=where, fontsize=9)
    for time, version in ledger.policy_switches():
        if not began <= time <= ended:
            continue
        for axis in axes:
            axis.axvline(time - began, color="#e08a00", linewidth=0.9, linestyle="--")
        where = axes[-1].get_xaxis_transform()
        axes[-1].text(
            time - began, 0.9, f" v{version}", transform=where, fontsize=8, color="#e08a00"
        )


def _row(cells: list[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"


def _phase_rows(summary: Summary) -> str:
    rows = [_row(["phase", "workloads", "tok/s", *ARMS, "cache accepts", "error (MAE)"], "th")]
    for phase in summary.phases:
        name = phase["name"]
        error = summary.mae[name]
        rows.append(
            _row(
                [
                    name,
                    ", ".join(phase["workloads"]),
                    f"{summary.tok_per_s[name]:.1f}",
                    *(f"{summary.arm_shares[name][arm]:.0%}" for arm in ARMS),
                    f"{summary.accepted_by_arm[name]['cache']:.2f}",
                    "-" if error is None else f"{error:.2f}",
                ]
            )
        )
    return "\n".join(rows)


def page(summary: Summary, picture: str) -> str:
    """The report as one HTML page.

    Args:
        picture: the curves, a PNG in base64.
    """
    switches = ", ".join(
        f"v{s['version']:.0f} at {s['at_s']:.0f} s" for s in summary.policy_switches
    )
    facts = {
        "requests": f"{summary.requests} ({summary.requests_failed} failed)",
        "tokens": f"{summary.tokens}",
        "draft events": (
            f"{summary.events_produced} made, {summary.events_consumed} learned from, "
            f"{summary.events_lost} lost"
        ),
        "labels": ", ".join(f"{n} {kind}" for kind, n in summary.labels.items()),
        "policies in force": switches or "none",
        "candidates": f"{summary.candidates}, of which {summary.promotions} promoted",
        "traffic changes detected": f"{summary.drifts}",
        "slowest policy swap": f"{summary.swap_ms_max:.1f} ms",
        "median time of a decision": f"{summary.choose_us_p50:.0f} µs a step",
        "machine": summary.machine,
        "date": f"{summary.date}, {summary.duration_s:.0f} s of traffic",
    }
    verdict = "; ".join(summary.failings) or "No event was lost, and the service learned."
    return _PAGE.format(
        verdict=html.escape(verdict),
        picture=picture,
        facts="\n".join(_row([name, value]) for name, value in facts.items()),
        phases=_phase_rows(summary),
    )


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Adaptive decoding: a demo run</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 58rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
td, th {{ border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: left }}
img {{ width: 100% }}
</style></head><body>
<h1>Adaptive decoding: a demo run</h1>
<p><b>{verdict}</b></p>
<table>{phases}</table>
<img alt="Curves over time" src="data:image/png;base64,{picture}">
<p>Black lines: the traffic changes. Dashed lines: a new policy comes into force.</p>
<table>{facts}</table>
</body></html>
"""
