"""Pictures of a version, as matplotlib figures by file name: MLflow shows them beside the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

SIZE: Final = (6.0, 4.0)  # inches


def of_training(metrics: Mapping[str, float], window: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to be drawn of a candidate: calibration, error over time, thresholds.

    Args:
        metrics: of the gate; ``decile_<n>_expected`` and ``decile_<n>_real`` are its calibration.
        window: as in :mod:`learner.registry.lineage`.
    """
    drawn = {}
    deciles = [
        (metrics[f"decile_{n}_expected"], metrics[f"decile_{n}_real"])
        for n in range(1, 11)
        if f"decile_{n}_real" in metrics
    ]
    if deciles:
        drawn["calibration.png"] = calibration(deciles)
    if window.get("errors"):
        drawn["error.png"] = error_over_time(window["errors"])
    if window.get("thresholds"):
        drawn["thresholds.png"] = rate_over_thresholds(window["thresholds"])
    return drawn


def calibration(deciles: Sequence[tuple[float, float]]) -> Any:
    """Expected against real accepted length of tenths of the drafts it was judged on, in tokens."""
    figure, axes = _axes("expected accepted length, tokens", "real accepted length, tokens")
    expected, real = zip(*deciles, strict=True)
    most = max(*expected, *real, 1.0)
    axes.plot([0, most], [0, most], color="grey", linewidth=1, label="as expected")
    axes.plot(expected, real, "o-", label="tenths of the drafts judged on")
    axes.legend()
    return figure


def error_over_time(errors: Sequence[Sequence[float]]) -> Any:
    """Mean absolute errors in tokens over time, rows of time, champion's, candidate's."""
    figure, axes = _axes("time, UTC", "mean absolute error, tokens")
    times, champion, candidate = zip(*errors, strict=True)
    at = [datetime.fromtimestamp(time, UTC) for time in times]
    axes.plot(at, champion, label="champion")
    axes.plot(at, candidate, label="this version; it has learned from all but the last drafts")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.autofmt_xdate()
    return figure


def rate_over_thresholds(rates: Sequence[Sequence[float]]) -> Any:
    """Rate that each threshold would have reached, rows of threshold in tokens and rate."""
    figure, axes = _axes("threshold, tokens", "rate")
    axes.plot(*zip(*rates, strict=True))
    return figure


def trial(points: Sequence[Sequence[float]]) -> Any:
    """Trial against champion over time: rows of time, ratio of rates, and its interval's ends."""
    figure, axes = _axes("time, UTC", "rate of the trial over the champion's")
    times, ratio, low, high = zip(*points, strict=True)
    at = [datetime.fromtimestamp(time, UTC) for time in times]
    axes.fill_between(at, low, high, alpha=0.3, label="95% interval, valid at any moment")
    axes.plot(at, ratio, label="ratio")
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.legend()
    figure.autofmt_xdate()
    return figure


def _axes(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: this runs in a thread

    figure = Figure(SIZE)  # margins by hand: laying it out would draw it twice
    figure.subplots_adjust(left=0.12, bottom=0.16, right=0.97, top=0.95)
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes
