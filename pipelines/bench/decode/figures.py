"""The pictures of the benchmark's report, each a PNG in base64."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipelines.bench.decode.structure import SIGNALS
from pipelines.bench.metrics import HIGH_PAYOFF
from pipelines.bench.results import Outcome, PromptFacts
from pipelines.prompts import FAMILIES

Record = Mapping[str, Any]

PAYOFFS: Final = (
    ("low: 0-1", 0, 2, "#c9c9c9"),
    (f"marginal: 2-{HIGH_PAYOFF - 1}", 2, HIGH_PAYOFF, "#8fb6e0"),
    (f"high: {HIGH_PAYOFF} or more", HIGH_PAYOFF, 1 << 30, "#2a9d4a"),
)
"""Classes of accepted length, tokens from and below; the paper draws the line at 6 only."""


def _plot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _png(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    _plot().close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


def family_name(family: str) -> str:
    """The printed name of a workload family."""
    return FAMILIES.get(family, family)


def speedups(records: Sequence[Record], methods: Sequence[str]) -> str:
    """Throughput over greedy's: a group of bars for each dataset, with 95% intervals."""
    plt = _plot()
    others = [m for m in methods if m != "greedy"]
    found = {(r["dataset"], r["method"]): r for r in records}
    datasets = list(dict.fromkeys(r["dataset"] for r in records))
    figure, axis = plt.subplots(
        figsize=(10, 1.2 + 0.17 * len(datasets) * max(2, len(others))), constrained_layout=True
    )
    height = 0.85 / max(1, len(others))
    for place, method in enumerate(others):
        at, widths, errors = [], [], []
        for row, dataset in enumerate(datasets):
            record = found.get((dataset, method))
            value = record["speedup_vs_greedy"] if record else None
            if record is None or value is None:
                continue
            low, high = record["speedup_vs_greedy_interval"] or (value, value)
            at.append(row + place * height)
            widths.append(value)
            errors.append((max(0.0, value - low), max(0.0, high - value)))
        if at:
            axis.barh(at, widths, height, label=method, xerr=np.array(errors).T, ecolor="#888888")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks([i + 0.43 - height / 2 for i in range(len(datasets))], datasets)
    axis.invert_yaxis()
    axis.set_xlabel("throughput / greedy's")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _png(figure)


def breakdown(overall: Sequence[Record]) -> str:
    """Cycles per 1K tokens and milliseconds a cycle, method by method (the paper's Figure 4)."""
    plt = _plot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3), constrained_layout=True)
    names = [r["method"] for r in overall]
    for axis, field, label in (
        (axes[0], "cycles_per_1k", "cycles per 1K tokens"),
        (axes[1], "ms_per_cycle", "ms a cycle"),
    ):
        axis.bar(names, [r[field] or 0.0 for r in overall], color="#3465c0")
        axis.set_ylabel(label)
        axis.tick_params(axis="x", rotation=35)
    return _png(figure)


def payoff(chosen: Mapping[str, Sequence[int]]) -> str:
    """Accepted lengths of the cache drafts that were verified, by family (Figure 3)."""
    plt = _plot()
    families = [f for f in chosen if chosen[f]]
    height = 1.2 + 0.5 * max(1, len(families))
    figure, axis = plt.subplots(figsize=(10, height), constrained_layout=True)
    left = np.zeros(len(families))
    for label, low, high, colour in PAYOFFS:
        shares = np.array([np.mean([low <= a < high for a in chosen[f]]) for f in families])
        axis.barh(range(len(families)), shares, left=left, label=label, color=colour)
        left += shares
    for row, family in enumerate(families):
        lengths = chosen[family]
        note = f" mean {np.mean(lengths):.1f}, n {len(lengths)}"
        axis.text(1.0, row, note, va="center", fontsize=9)
    axis.set_yticks(range(len(families)), [family_name(f) for f in families])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25)
    axis.set_xlabel("share of the cache drafts that were verified")
    if families:
        axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return _png(figure)


def chosen_payoffs(
    prompts: Mapping[str, Sequence[Mapping[str, Outcome]]], method: str
) -> dict[str, list[int]]:
    """Accepted length of every cache draft that ``method`` verified, by family."""
    return {
        family: [c.accepted for p in found for c in p[method].cycles if c.arm == "cache"]
        for family, found in prompts.items()
    }


def structure(facts: Sequence[PromptFacts], cache_share: Mapping[str, float | None]) -> str:
    """Prompt-side signals by family, and the share of cycles that verify cache drafts (Figure 2).

    Args:
        cache_share: of one method, by family.
    """
    plt = _plot()
    present = {f.family for f in facts}
    known = [f for f in FAMILIES if f in present]
    families = known + sorted(present - set(known))
    means = np.array(
        [
            [np.mean([f.structure[s] for f in facts if f.family == family]) for s in SIGNALS]
            for family in families
        ]
    )
    scaled = means / np.maximum(means.max(axis=0), 1e-9)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 1.8 + 0.42 * len(families)), constrained_layout=True,
        width_ratios=(3, 1), sharey=True,
    )  # fmt: skip
    left.imshow(scaled, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    left.set_xticks(range(len(SIGNALS)), list(SIGNALS.values()), rotation=30, ha="right")
    left.set_yticks(range(len(families)), [family_name(f) for f in families])
    for row, values in enumerate(means):
        for column, value in enumerate(values):
            dark = scaled[row, column] > 0.6
            text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
            left.text(
                column, row, text, ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
    left.set_title("(a) signals of the prompts", fontsize=10)
    shares = [100 * (cache_share.get(family) or 0.0) for family in families]
    right.barh(range(len(families)), shares, color="#2a9d4a")
    right.set_xlabel("% of cycles")
    right.set_title("(b) cache drafts verified", fontsize=10)
    return _png(figure)
