"""From what servers did to what is reported: medians over rounds, and ratios taken within a round.

A machine that is slower in one round than in another is slower for every configuration of that
round, so a ratio is formed inside each round and the median taken afterwards.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipelines.bench.known import median, percentile
from pipelines.bench.metrics import loops
from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.passes import Level, ServerRun
from pipelines.bench.serve.setups import Setup

Of = Callable[[Level], float | None]

RATE: Of = attrgetter("rate")
PER_CPU_S: Of = attrgetter("per_cpu_s")


def paces(replies: Iterable[Reply]) -> list[float]:
    """Milliseconds a token after each answer's first piece, of those with more than one token."""
    return [
        1e3 * (r.latency_s - r.ttft_s) / (len(r.tokens) - 1) for r in replies if len(r.tokens) > 1
    ]


MEASURES: dict[str, Of] = {
    "tok_per_s": lambda level: level.rate,
    "latency_p50_s": lambda level: percentile([r.latency_s for r in level.answered], 50),
    "latency_p95_s": lambda level: percentile([r.latency_s for r in level.answered], 95),
    "ttft_p50_s": lambda level: percentile([r.ttft_s for r in level.answered], 50),
    "ms_per_token_p50": lambda level: percentile(paces(level.answered), 50),
    "mean_accepted": lambda level: level.counters.accepted / max(1, level.counters.drafts),
    "mean_drafted": lambda level: level.counters.drafted / max(1, level.counters.drafts),
    "acceptance_rate": lambda level: level.counters.accepted / max(1, level.counters.drafted),
    "cycles_per_1k": lambda level: (
        1e3 * (level.tokens - level.counters.accepted) / max(1, level.tokens)
    ),
    "steps_per_1k": lambda level: 1e3 * level.counters.steps / max(1, level.tokens),
    "cpu_s_per_1k": lambda level: (
        None if level.cpu_s is None else 1e3 * level.cpu_s / max(1, level.tokens)
    ),
    "loop_share": lambda level: (
        sum(loops(r.tokens) for r in level.answered) / max(1, len(level.answered))
    ),
}
"""Figures of one server at one concurrency. A cycle is one verification of one request, counted as
tokens less accepted draft tokens; a step is one of the engine's, for all running requests.
``cpu_s_per_1k`` is processor time of the server's processes, which other work on the machine
disturbs less than it does the clock."""


def summarise(runs: Sequence[ServerRun], setups: Sequence[Setup]) -> list[dict[str, Any]]:
    """One record for each setup and concurrency.

    ``best_fixed`` is the fastest of the setups that are not the hybrid, by median rate at that
    concurrency; ``best_of_method`` marks the fastest of its method's.
    """
    by_name = {s.name: s for s in setups}
    places: dict[tuple[str, int], dict[int, Level]] = {}
    for run in runs:
        for level in run.levels:
            places.setdefault((run.setup, level.concurrency), {})[run.round] = level
    records = []
    for (name, concurrency), rounds in sorted(
        places.items(), key=lambda p: (p[0][1], list(by_name).index(p[0][0]))
    ):
        rivals = {n: r for (n, c), r in places.items() if c == concurrency}
        fixed = {n: r for n, r in rivals.items() if by_name[n].method != "hybrid"}
        setup = by_name[name]
        kin = [n for n in rivals if by_name[n].method == setup.method]
        best = max(fixed, key=lambda n: median_rate(fixed[n])) if fixed else None
        plain, rival = rivals.get("none", {}), fixed[best] if best else {}
        same, compared = _equal(rounds, plain)
        record: dict[str, Any] = {
            "configuration": name,
            "method": setup.method,
            "k": setup.k,
            "padded": setup.padded,
            "concurrency": concurrency,
            "rounds": len(rounds),
            "requests": sum(len(level.replies) for level in rounds.values()),
            "failed": sum(bool(r.error) for level in rounds.values() for r in level.replies),
            "tokens": sum(level.tokens for level in rounds.values()),
        }
        for measure, of in MEASURES.items():
            record[measure] = median(map(of, rounds.values()))
        rates = [level.rate for level in rounds.values()]
        record |= {
            "tok_per_s_range": [min(rates), max(rates)],
            "ratio_to_none": _ratio(rounds, plain, RATE),
            "ratio_to_best_fixed": _ratio(rounds, rival, RATE),
            "cpu_ratio_to_none": _ratio(rounds, plain, PER_CPU_S),
            "cpu_ratio_to_best_fixed": _ratio(rounds, rival, PER_CPU_S),
            "best_fixed": best,
            "best_of_method": name == max(kin, key=lambda n: median_rate(rivals[n])),
            "equal_to_none": same,
            "compared_with_none": compared,
        }
        records.append(record)
    return records


def median_rate(rounds: Mapping[int, Level]) -> float:
    """Tokens a second, the median over rounds."""
    return statistics.median(level.rate for level in rounds.values())


def _ratio(mine: dict[int, Level], theirs: dict[int, Level], of: Of) -> float | None:
    pairs = [(of(mine[r]), of(theirs[r])) for r in mine if r in theirs]
    return median(a / b for a, b in pairs if a and b)


def _equal(mine: dict[int, Level], plain: dict[int, Level]) -> tuple[int, int]:
    """Answers that equal the ones without speculation token for token, of those compared."""
    pairs = [
        (a.tokens, b.tokens)
        for r in mine
        if r in plain
        for a, b in zip(mine[r].replies, plain[r].replies, strict=True)
        if not a.error and not b.error
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    """One table for each concurrency, 110 columns wide; a star marks the best of a method.

    ``/none`` and ``/best`` are ratios of output rates, ``cpu/none`` of tokens for each second of
    processor time.
    """
    shown = []
    for concurrency in sorted({r["concurrency"] for r in records}):
        table = Table(
            title=f"{concurrency} at a time", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        table.add_column("configuration", no_wrap=True)
        for column in (
            "tok/s", "/none", "/best", "p50 s", "p95 s", "TTFT s", "ms/tok", "cpu/none",
            "acc.", "cyc/1K", "=none",
        ):  # fmt: skip
            table.add_column(column, justify="right", no_wrap=True)
        for r in (r for r in records if r["concurrency"] == concurrency):
            speculates = r["method"] != "none"
            table.add_row(
                r["configuration"] + (" *" if r["best_of_method"] and r["k"] else ""),
                f"{r['tok_per_s']:.1f}",
                figure(r["ratio_to_none"]),
                figure(r["ratio_to_best_fixed"]),
                figure(r["latency_p50_s"]),
                figure(r["latency_p95_s"]),
                figure(r["ttft_p50_s"]),
                figure(r["ms_per_token_p50"], 0),
                figure(r["cpu_ratio_to_none"]),
                figure(r["mean_accepted"]) if speculates else "",
                f"{r['cycles_per_1k']:.0f}",
                f"{r['equal_to_none']}/{r['compared_with_none']}" if speculates else "",
            )
        shown.append(table)
    return shown


def figure(value: float | None, digits: int = 2) -> str:
    """``value`` for a table; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"
