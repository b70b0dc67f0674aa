"""``hvd drift``: options in, a table out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from decoder.contracts.errors import SettingsError, TraceError
from decoder.payoff.token_classes import token_classes_of
from pipelines.bench.commas import words
from pipelines.drift.columns import NAMES
from pipelines.drift.study import Recordings
from pipelines.progress import Step
from pipelines.replay import own

WORDS: Final = ("refit", "adaptive", "first", "frozen", "counting", "paper")
"""Policies of the printed table, in its order."""


def seeds_and_policies(seeds: str, policies: str) -> tuple[list[int], list[str]]:
    """What the options say.

    Raises:
        SettingsError: a seed or policy is none.
    """
    numbers = words(seeds)
    if not numbers or not all(seed.isdecimal() for seed in numbers):
        raise SettingsError(
            f"--seeds {seeds!r}: give whole numbers, with commas; a seed is not negative."
        )
    asked = words(policies) or NAMES
    unknown = sorted(set(asked) - set(NAMES))
    if unknown:
        raise SettingsError(f"no policy {unknown[0]!r}: there are {', '.join(NAMES)}.")
    return list(map(int, numbers)), [name for name in NAMES if name in asked]


def recordings(traces: Path | None, tokenizer: Any, step: Step) -> Recordings:
    """Those in ``traces``, or the project's own.

    Raises:
        TraceError: there are none.
    """
    folder = traces or own.folder()
    if traces is None and not any(folder.glob("*.jsonl")):
        raise TraceError("no recordings: name a folder with --traces, or make some, --record 60.")
    return Recordings(folder, tokenizer, token_classes_of(tokenizer), step)


def outcome(summary: dict[str, Any]) -> Table:
    """Shares of the oracle's rate after the change, mean over the seeds."""
    found = summary["scenarios"]
    policies = [name for name in WORDS if any(name in f["policies"] for f in found)]
    made = Table(title="Share of the oracle's rate after the change", caption=_CAPTION)
    made.add_column("scenario", overflow="fold", min_width=12)
    for name in (*policies, "adaptive / best", "oracle"):
        made.add_column(name, justify="right")
    for scenario in dict.fromkeys(f["name"] for f in found):
        seeds = [f for f in found if f["name"] == scenario]
        shares = (_mean(seeds, name, "oracle_fraction_after") for name in policies)
        known = [g for g in map(_guard, seeds) if g is not None]
        least = f"{min(known):.3f}" if known else "-"
        made.add_row(scenario, *shares, least, _mean(seeds, "oracle", "rate_after"))
    return made


def alarmed(summary: dict[str, Any]) -> Table:
    """Alarms by kind of text."""
    made = Table(title="Alarms where nothing changes")
    for name in ("text", "sessions", "rows", "alarms, cache", "alarms, model"):
        made.add_column(name, justify="left" if name == "text" else "right")
    for each in summary["streams"]:
        counts = (each[name] for name in ("sessions", "rows", "cache", "model"))
        made.add_row(each["kind"], *(f"{n:,}" for n in counts))
    alarms = summary["alarms"]
    whole = (summary["rows"], alarms["cache"], alarms["model"])
    made.add_row("all", "", *(f"{n:,}" for n in whole))
    return made


def _guard(figures: dict[str, Any]) -> float | None:
    """Rate of the learner over the better of the first policy and the one trained before."""
    policies = figures["policies"]
    if not {"adaptive", "first", "frozen"} <= policies.keys():
        return None
    best = max(policies["first"]["rate"], policies["frozen"]["rate"])
    return float(policies["adaptive"]["rate"] / best) if best else None


def _mean(seeds: Sequence[dict[str, Any]], policy: str, figure: str) -> str:
    values = [
        f["policies"][policy][figure] for f in seeds if figure in f["policies"].get(policy, {})
    ]
    return f"{np.mean(values):.3f}" if values else "-"


_CAPTION: Final = (
    "Mean over seeds. adaptive / best: over all requests, the worst seed, against the better of "
    "first and frozen. oracle: tokens in the time of a plain step."
)
