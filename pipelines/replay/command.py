"""``hvd replay``: options in, progress while it runs, a table or JSON out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import SettingsError, TraceError
from decoder.payoff.token_classes import token_classes_of
from decoder.policy.first import first_policy
from decoder.policy.pricing import NOMINAL
from decoder.settings import WorkerSettings
from pipelines.embedded import load_tokenizer
from pipelines.progress import Shown
from pipelines.prompts import PromptSet, fitting, read_folder
from pipelines.replay import recording, rules
from pipelines.replay.engine import Simulator
from pipelines.replay.measure import Report, mean_fractions, together
from pipelines.replay.study import File, Plan, Study
from pipelines.replay.traces import Notice

SHOWN: Final = 10
"""Notices shown of each file; the counts by reason are complete."""
HEADINGS: Final = {
    "model_best": "model",
    "match4": "match4",
    "buckets": "buckets",
    "frequency": "freq",
    "frequency_tuned": "freq*",
    "arctic": "arctic",
    "hybrid": "hybrid",
}
"""Methods in the table; the JSON holds all."""


def run(
    paths: Sequence[Path], plan: Plan, tokenizer: Any, console: Console
) -> tuple[list[Report], list[Notice]]:
    """Replay and measure ``paths``; one report a file, in their order.

    A file that cannot be used costs a notice.

    Raises:
        TraceError: not one can be used.
    """
    classes = token_classes_of(tokenizer)
    files: list[File] = []
    with Shown(console) as shown:
        study = Study(plan, tokenizer, classes, shown.step)
        for path in paths:
            try:
                file = study.read(path)
            except TraceError as error:
                study.notices.append(Notice("unreadable", str(error)))
                continue
            if file is not None:
                files.append(file)
        if not files:
            last = study.notices[-1].text if study.notices else "no file was named."
            raise TraceError(f"nothing to measure: {last}")
        policy = study.trained(files)
        reports = [study.measured(file, policy) for file in files]
    return reports, study.notices


def as_dict(reports: Sequence[Report], plan: Plan, notices: Sequence[Notice]) -> dict[str, Any]:
    """All figures: those of all files together on top, then each file's, and how they were made."""
    whole = together(list(reports)).as_dict()
    del whole["name"], whole["thresholds"]
    policy = plan.policy
    return {
        **whole,
        "mean_fraction_of_oracle": mean_fractions(list(reports)),
        "files": [r.as_dict() for r in reports],
        "settings": {
            "model_accepts": plan.model_accepts,
            "limit": plan.limit,
            "policy": f"{policy.kind} v{policy.version}" if policy else "trained here",
        },
        "notices": [n.text for n in notices],
    }


def table(reports: Sequence[Report]) -> Table:
    """Each method's rate as a share of the oracle's."""
    rows = list(reports) if len(reports) == 1 else [*reports, together(list(reports))]
    methods = [name for name in HEADINGS if name in reports[0].tallies]
    rates = Table(title="Simulated decoding of the test sessions", caption=_RATES)
    rates.add_column("file", overflow="fold", min_width=12)
    for heading in (*(HEADINGS[name] for name in methods), "oracle"):
        rates.add_column(heading, justify="right", no_wrap=True)
    for report in rows:
        f = report.fractions()
        shares = (f"{f[name]:.3f}" for name in methods)
        rates.add_row(escape(report.name), *shares, f"{report.tallies['oracle'].rate:.2f}")
    if len(reports) > 1:
        f = mean_fractions(list(reports))
        rates.add_row("mean of files", *(f"{f[name]:.3f}" for name in methods))
    return rates


_RATES: Final = (
    "Shares of the hindsight oracle's rate; oracle: its tokens in the time of a plain step. "
    "*: threshold tuned on the training sessions."
)


@dataclass(frozen=True)
class Asked:
    """Prompts to record and to replay by every rule; ``nominal`` costs, or those measured here."""

    prompts: Path
    limit: int = 12
    policy: Policy | None = None
    nominal: bool = False


def prompts_of(
    read: Sequence[PromptSet], limit: int, tokenizer: Any, room: int, problems: list[str]
) -> dict[str, list[tuple[int, ...]]]:
    """The first ``limit`` prompts of each set as token ids, cut in their middle to ``room``; those
    that cannot be used are told to ``problems``."""
    sets = {}
    for each in read:
        fits = fitting(each, tokenizer, "chat", room, "truncate", problems.append)
        if ids := [prompt.ids for prompt in itertools.islice(fits, limit)]:
            sets[each.name] = ids
    return sets


def by_rules(asked: Asked, console: Console) -> dict[str, Any]:
    """Record the prompts of a folder, where that was not done, and replay them by every rule.

    Raises:
        SettingsError: there is no such folder, or no prompt in it that can be used.
    """
    plan, problems = recording.Plan(), list[str]()
    read = list(read_folder(asked.prompts, (), problems))
    tokenizer = load_tokenizer(None)
    sets = prompts_of(read, asked.limit, tokenizer, plan.prompt, problems)
    for problem in problems:
        console.print(f"[yellow]{escape(problem)}[/yellow]", highlight=False, soft_wrap=True)
    if not sets:
        raise SettingsError(f"no prompt in {asked.prompts} can be used; the lines above say why.")
    classes = token_classes_of(tokenizer)
    with Shown(console) as shown:
        folder = recording.record(sets, plan, shown.step)
        costs = NOMINAL if asked.nominal else recording.costs_of(folder, shown.step)
        policy = asked.policy or first_policy(ANY_SCOPE)
        simulator = Simulator(classes, WorkerSettings.load(), costs=costs)
        found = {}
        for done, name in enumerate(sets):
            shown.step(f"replaying {name}", done, len(sets))
            traces = recording.traces_of(folder, name, sets[name])
            found[name] = rules.all_ruled(traces, policy, simulator)
    settled = {"costs": costs.setup, "prompts_a_set": asked.limit}
    return settled | rules.summary(found)


def rule_tables(summary: dict[str, Any]) -> list[Table]:
    """Each rule's rate over greedy's by set, and what was foreseen of either arm by decile."""
    means = summary["x_greedy_mean"]
    shown = [rule for rule in means if rule != "greedy"]
    rates = Table(title="Tokens a unit of time, over greedy's", caption=_RULED)
    rates.add_column("set", overflow="fold", min_width=10)
    for heading in (*shown, "best", "/ best", "/ picked"):
        rates.add_column(heading, justify="right", overflow="fold")
    for name, over in summary["x_greedy"].items():
        best = summary["best_rule"][name]
        at = summary["hybrid_over_picked"].get(name)
        picked = f"{at['ratio']:.3f} ({at['low']:.2f}-{at['high']:.2f})" if at else "-"
        last = (best, f"{summary['hybrid_over_best'][name]:.3f}", picked)
        rates.add_row(escape(name), *(f"{over[rule]:.2f}" for rule in shown), *last)
    means_of = ("hybrid_over_best_mean", "hybrid_over_picked_mean")
    last = (
        summary["best_single"],
        *("-" if m is None else f"{m:.3f}" for m in map(summary.get, means_of)),
    )
    rates.add_row("mean", *(f"{means[rule]:.3f}" for rule in shown), *last)
    return [rates, _deciles(summary["calibration"])]


def _deciles(calibration: dict[str, list[dict[str, float]]]) -> Table:
    made = Table(title="Accepted tokens foreseen, and what came, by decile")
    for heading in ("arm", "", *map(str, range(1, 11))):
        made.add_column(heading, justify="right")
    for arm, parts in calibration.items():
        for what in ("foreseen", "came"):
            made.add_row(arm, what, *(f"{part[what]:.2f}" for part in parts))
    return made


_RULED: Final = (
    "@2: two tokens of a draft for each one matched. / best: the hybrid over the best rule, "
    "/ picked: over the one that was best on the other half of the prompts. Means are geometric."
)


def show_notices(notices: Sequence[Notice], console: Console) -> None:
    """What was left out, a sentence each; a file with many gets the first and a count."""
    by_file: dict[str, list[Notice]] = {}
    for notice in notices:
        by_file.setdefault(notice.text.split(":")[0], []).append(notice)
    for name, those in by_file.items():
        for notice in those[:SHOWN]:
            console.print(escape(notice.text), style="yellow", highlight=False, soft_wrap=True)
        if len(those) > SHOWN:
            more = f"{name}: and {len(those) - SHOWN} more lines were not used in full."
            console.print(escape(more), style="yellow", highlight=False, soft_wrap=True)
