"""``hvd drift``: options in, progress while it runs, a page, a table or JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import SettingsError, TraceError
from decoder.payoff.token_classes import token_classes_of
from decoder.policy.first import first_policy
from pipelines import machine
from pipelines.bench.commas import words
from pipelines.drift.columns import NAMES
from pipelines.drift.measure import Run
from pipelines.drift.results import Results
from pipelines.drift.scenario import chosen
from pipelines.drift.stationary import Stream, measure, totals
from pipelines.drift.study import Plan, Recordings, Study
from pipelines.progress import Shown
from pipelines.replay import own
from pipelines.replay.bundles import load_policy
from pipelines.reports import write_json

WORDS: Final = ("refit", "adaptive", "first", "frozen", "counting", "paper")
"""Policies of the printed table, in its order."""


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line; no ``traces`` are the project's own recordings."""

    traces: Path | None
    scenarios: Sequence[str]
    seeds: str
    policies: str
    scale: float
    out: Path
    resume: bool


def plan(options: Options) -> Plan:
    """The plan that ``options`` ask for.

    Raises:
        SettingsError: a seed, policy or scenario is none.
    """
    seeds = seeds_of(options)
    asked = words(options.policies) or NAMES
    unknown = sorted(set(asked) - set(NAMES))
    if unknown:
        raise SettingsError(f"no policy {unknown[0]!r}: there are {', '.join(NAMES)}.")
    policies = [name for name in NAMES if name in asked]
    return Plan(chosen(options.scenarios), seeds, policies, options.scale)


def seeds_of(options: Options) -> list[int]:
    """The seeds that ``options`` ask for.

    Raises:
        SettingsError: they are none.
    """
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError as error:
        raise SettingsError(
            f"--seeds {options.seeds!r}: give whole numbers with commas between them."
        ) from error
    if min(seeds) < 0:
        raise SettingsError(f"--seeds {options.seeds!r}: a seed is not negative.")
    return seeds


def first_of(path: Path | None) -> Policy:
    """The bundle in ``path``, or the first policy that ships.

    Raises:
        ModelError: there is none.
        PolicyRefused: it is damaged, or made for other features.
    """
    return first_policy("drift") if path is None else load_policy(path)


def run(options: Options, tokenizer: Any, first: Policy, console: Console) -> dict[str, Any]:
    """Run the study; writes ``results.json`` into the folder, also of what is done when it is
    interrupted.

    Raises:
        SettingsError: the options are wrong.
        TraceError: there are no recordings, or not one scenario can be run.
    """
    asked = plan(options)
    with Shown(console) as shown:
        source = _recordings(options, tokenizer, shown)
        study = Study(asked, source, Results(options.out, Run, options.resume), first, shown.step)
        try:
            study.run()
        finally:
            summary = _written(study, source, asked, options.out)
    if not study.found:
        raise TraceError(f"nothing was measured: {study.notices[-1]}")
    return summary


def false_alarms(
    options: Options, rows: int, tokenizer: Any, first: Policy, console: Console
) -> dict[str, Any]:
    """Count alarms in so many rows of traffic that does not change; writes ``false-alarms.json``.

    Raises:
        TraceError: there are no recordings.
        SettingsError: what the folder holds is not of this version.
    """
    torch.set_num_threads(1)
    with Shown(console) as shown:
        source = _recordings(options, tokenizer, shown)
        results = Results(options.out, Stream, options.resume, "streams")
        summary = totals(measure(rows, source, results, first, shown.step))
    summary["machine"] = machine.description()
    write_json(summary, options.out / "false-alarms.json")
    return summary


def _recordings(options: Options, tokenizer: Any, shown: Shown) -> Recordings:
    folder = options.traces or own.folder()
    if options.traces is None and not any(folder.glob("*.jsonl")):
        raise TraceError("no recordings: name a folder with --traces, or make some, --record 60.")
    return Recordings(folder, tokenizer, token_classes_of(tokenizer), shown.step)


def _written(study: Study, source: Recordings, asked: Plan, folder: Path) -> dict[str, Any]:
    notices = [*source.notices, *study.notices]
    summary: dict[str, Any] = {
        "scenarios": study.found,
        "settings": {"seeds": list(asked.seeds), "policies": list(asked.policies),
                     "scale": asked.scale, "machine": machine.description()},
        "notices": notices,
    }  # fmt: skip
    write_json(summary, folder / "results.json")
    return summary


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
        guards = [guard(f) for f in seeds]
        known = [g for g in guards if g is not None]
        made.add_row(
            scenario,
            *shares,
            f"{min(known):.3f}" if known else "-",
            _mean(seeds, "oracle", "rate_after", 2),
        )
    return made


def alarmed(summary: dict[str, Any]) -> Table:
    """Alarms by kind of text."""
    made = Table(title="Alarms where nothing changes")
    for name in ("text", "sessions", "rows", "alarms, cache", "alarms, model"):
        made.add_column(name, justify="left" if name == "text" else "right")
    streams = summary["streams"]
    for kind in dict.fromkeys(each["kind"] for each in streams):
        of_kind = [each for each in streams if each["kind"] == kind]
        sums = (sum(each[name] for each in of_kind) for name in ("rows", "cache", "model"))
        made.add_row(kind, str(of_kind[0]["sessions"]), *(f"{n:,}" for n in sums))
    alarms = summary["alarms"]
    whole = (summary["rows"], alarms["cache"], alarms["model"])
    made.add_row("all", "", *(f"{n:,}" for n in whole))
    return made


def guard(figures: dict[str, Any]) -> float | None:
    """Rate of the learner over the better of the first policy and the one trained before."""
    policies = figures["policies"]
    if not {"adaptive", "first", "frozen"} <= policies.keys():
        return None
    best = max(policies["first"]["rate"], policies["frozen"]["rate"])
    return float(policies["adaptive"]["rate"] / best) if best else None


def _mean(seeds: Sequence[dict[str, Any]], policy: str, figure: str, digits: int = 3) -> str:
    values = [
        f["policies"][policy][figure] for f in seeds if figure in f["policies"].get(policy, {})
    ]
    return f"{np.mean(values):.{digits}f}" if values else "-"


_CAPTION: Final = (
    "Mean over seeds. adaptive / best: over all requests, the worst seed, against the better of "
    "first and frozen. oracle: tokens in the time of a plain step."
)
