"""The figures and tables of ``hvd bench decode``. Definitions follow the paper (Appendix A, G).

With T decoded tokens, decoding time S and C cycles over a set of prompts: throughput ``T / S``,
``1000 C / T`` cycles per 1K tokens, ``S / C`` per cycle, and ``T / C - 1`` accepted draft tokens
per cycle. All exclude a prompt's first token, which its prefill produces.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from decoder.engines.reference.session import CycleRecord, Generation
from pipelines.stats import against_best, columns, interval, loops, over, rate


class Key(NamedTuple):
    """A measured prompt; ``prompt`` is its id."""

    dataset: str
    prompt: str


def decoded(generation: Generation) -> int:
    """Number of tokens that cycles committed: all but the first, which the prefill produces."""
    return max(0, len(generation.tokens) - 1)


@dataclass(frozen=True)
class Measured:
    """A prompt's family and what every method generated."""

    family: str
    outcomes: dict[str, Generation]


@dataclass
class Results:
    """The prompts of a run, in order, and its problems. ``settings`` are JSON-ready."""

    settings: dict[str, Any]
    prompts: dict[Key, Measured] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def problem(self, sentence: str) -> None:
        """Record a problem, once. Mutates."""
        if sentence not in self.problems:
            self.problems.append(sentence)


ByMethod = Mapping[str, Generation]


def typical(prompts: Sequence[ByMethod]) -> dict[str, list[tuple[float, float]]]:
    """Decoded tokens and microseconds of each method by prompt, with every cycle at the median time
    of its kind.

    On a busy machine a few stalled cycles can outweigh all others. Medians over all methods remove
    their effect on ratios. Cycles of one kind do about the same work: they use the same arm and
    verify as many tokens, up to a factor of two.
    """

    def kind(cycle: CycleRecord) -> tuple[str, int]:
        return cycle.arm, cycle.verified.bit_length()

    kinds = defaultdict(list)
    for cycle in (c for p in prompts for o in p.values() for c in o.cycles):
        kinds[kind(cycle)].append(cycle.us)
    times = {each: float(np.median(times_of_kind)) for each, times_of_kind in kinds.items()}
    return {
        name: [(decoded(p[name]), sum(times[kind(c)] for c in p[name].cycles)) for p in prompts]
        for name in prompts[0]
    }


def speeds(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """Throughput, cycles and arm shares of ``method``."""
    mine = [p[method] for p in prompts]
    spent, greedy = (
        [(decoded(p[name]), p[name].decode_us) for p in prompts if name in p]
        for name in (method, "greedy")
    )
    cycles = [c for o in mine for c in o.cycles]
    tokens = sum(map(decoded, mine))
    accepted = {arm: [c.accepted for c in cycles if c.arm == arm] for arm in ("cache", "model")}
    return {
        "prompts": len(mine),
        "tokens": sum(len(o.tokens) for o in mine),
        "tok_per_s": rate(spent),
        "speedup_vs_greedy": over(rate(spent), rate(greedy)),
        "speedup_vs_greedy_interval": interval(columns(spent), columns(greedy)) if greedy else None,
        "cycles_per_1k": over(1000 * len(cycles), tokens),
        "ms_per_cycle": over(sum(o.decode_us for o in mine) / 1000, len(cycles)),
        "mean_accepted": over(tokens - len(cycles), len(cycles)),
        **{f"mean_accepted_{arm}": over(sum(n), len(n)) for arm, n in accepted.items()},
        **{f"{arm}_share": over(len(n), len(cycles)) for arm, n in accepted.items()},
    }


def _over_best(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """A learned method over the best rule, which is chosen on the other half of the prompts; every
    cycle takes the median time of its kind."""
    best = None
    if method.startswith("hybrid"):
        spent = {name: columns(pairs) for name, pairs in typical(prompts).items()}
        rules = {m: s for m, s in spent.items() if not m.startswith("hybrid")}
        best = against_best(spent[method], rules)
    return {
        "over_best_rule": best and best.ratio,
        "over_best_rule_interval": best and (best.low, best.high),
        "best_rules": best and best.rivals,
    }


def measure(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """The figures of ``method`` over ``prompts``, and over those whose output does not loop.
    Returns the record of a (dataset, method), without their names. Unknown figures (no cycles, no
    greedy run) are None."""
    straight = [p for p in prompts if not loops(p[method].tokens)]
    equal = [p[method].tokens == p["greedy"].tokens for p in prompts if "greedy" in p]
    return {
        **speeds(prompts, method),
        "exact": all(equal) if equal else None,
        "loop_share": 1.0 - len(straight) / len(prompts),
        "not_looping": speeds(straight, method) if straight else None,
    }


def differing(results: Results) -> list[str]:
    """One sentence for each generation that differs from greedy's."""
    sentences = []
    for key, prompt in results.prompts.items():
        for name, outcome in prompt.outcomes.items():
            plain = prompt.outcomes.get("greedy", outcome)
            pairs = itertools.zip_longest(outcome.tokens, plain.tokens)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if at is not None:
                sentences.append(
                    f"{name} differs from greedy on prompt {key.prompt} of {key.dataset}, "
                    f"from output token {at} on."
                )
    return sentences


def summary(results: Results) -> dict[str, Any]:
    """The report of a run, JSON-ready; ``records`` are by dataset and method."""
    sets: dict[tuple[str, str], list[ByMethod]] = defaultdict(list)
    for key, prompt in results.prompts.items():
        sets[key.dataset, prompt.family].append(prompt.outcomes)
    every, wanted = [p for some in sets.values() for p in some], results.settings["methods"]
    return {
        "contract": "hvd.bench.decode.v1",
        "began": results.began,
        "settings": results.settings,
        "prompts": len(results.prompts),
        "interrupted": results.interrupted,
        "problems": results.problems,
        "differing": differing(results),
        "records": [
            {"dataset": dataset, "method": method, "family": family}
            | measure(some, method)
            | _over_best(some, method)
            for (dataset, family), some in sets.items()
            for method in wanted
        ],
        "overall": [{"group": "all", "method": m} | measure(every, m) for m in wanted],
    }


Cell = Callable[[dict[str, Any]], str]


def number(value: float | None, digits: int = 2) -> str:
    """``value`` for a table; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share for a table; a dash for None."""
    return "-" if value is None else f"{value:.0%}"


COLUMNS: Final[dict[str, Cell]] = {
    "method": lambda r: r["method"],
    "tok/s": lambda r: number(r["tok_per_s"], 1),
    "speed": lambda r: number(r["speedup_vs_greedy"]),
    "cyc/1K": lambda r: number(r["cycles_per_1k"], 0),
    "ms/cyc": lambda r: number(r["ms_per_cycle"], 1),
    "acc": lambda r: number(r["mean_accepted"]),
    "cache": lambda r: percent(r["cache_share"]),
    "model": lambda r: percent(r["model_share"]),
    "loops": lambda r: percent(r["loop_share"]),
    "same": lambda r: {True: "yes", False: "NO", None: "-"}[r["exact"]],
}
"""Columns of ``hvd bench decode``."""


def table(title: str, columns: Mapping[str, Cell], records: Iterable[dict[str, Any]]) -> Table:
    """A table with a row for each of ``records``. The first column is left-aligned and never
    wraps."""
    shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0), show_edge=False)
    for at, name in enumerate(columns):
        shown.add_column(name, justify="right" if at else "left", overflow="fold", no_wrap=not at)
    for record in records:
        shown.add_row(*(cell(record) for cell in columns.values()))
    return shown


def facts(title: str, figures: Mapping[str, Any]) -> Table:
    """A table of one measurement's figures, a row each, under their names in the JSON."""
    shown = Table("", "", title=title, show_header=False)
    for name, value in figures.items():
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            text = f"{one:,.4g}" if isinstance(one, float) else "-" if one is None else f"{one}"
            shown.add_row(f"{name} {key}".rstrip().replace("_", " "), text)
    return shown
