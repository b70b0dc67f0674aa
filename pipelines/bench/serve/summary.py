"""From what servers did to what is reported.

A request is a session of one turn. Ratios pair the same session under two configurations within a
round, since a machine is slower in one round than in another, and resample sessions for their
interval: a session's turns hang together, sessions do not. Rates hold the reading of a turn as well
as its answering, which is what a person or an agent waits for.

======== ==========================================================================================
group    answers in it
======== ==========================================================================================
all      every one
first    those to a session's first turn: no caches know its text yet
warm     those to its further turns
straight those that hold no loop, under neither configuration where two are compared
======== ==========================================================================================
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.passes import Level, ServerRun
from pipelines.bench.serve.setups import BASELINES, Setup
from pipelines.bench.stats import loops, median, over, percentile, rate, ratio_interval

Rounds = Mapping[int, Level]
Place = tuple[int, str, int]
"""Round, session, turn."""

GROUPS: Final[dict[str, Callable[[Reply], bool]]] = {
    "all": lambda reply: True,
    "first": lambda reply: reply.turn == 0,
    "warm": lambda reply: reply.turn > 0,
    "straight": lambda reply: not loops(reply.tokens),
}


def summarise(runs: Sequence[ServerRun], setups: Sequence[Setup]) -> list[dict[str, Any]]:
    """One record for each setup and concurrency.

    ``against`` compares with the best setup of each other method, by its rate at that concurrency:
    picked on the figures it is compared on, which favours it.
    """
    order = {s.name: place for place, s in enumerate(setups)}
    places: dict[int, dict[str, dict[int, Level]]] = {}
    for run in runs:
        for level in run.levels:
            here = places.setdefault(level.concurrency, {})
            here.setdefault(run.setup, {})[run.round] = level
    records = []
    for concurrency, here in sorted(places.items()):
        best = {
            method: max(kin, key=lambda name: _median_rate(here[name]))
            for method in BASELINES
            if (kin := [s.name for s in setups if s.method == method and s.name in here])
        }
        for name in sorted(here, key=order.__getitem__):
            setup = setups[order[name]]
            others = {m: b for m, b in best.items() if m != setup.method}
            records.append(
                {
                    "configuration": name,
                    "method": setup.method,
                    "k": setup.k,
                    "padded": setup.padded,
                    "concurrency": concurrency,
                    "best_of_method": best.get(setup.method) == name,
                    **_whole(here[name], here.get("none", {})),
                    "groups": {group: figures(here[name], group) for group in GROUPS},
                    "against": {
                        method: {"configuration": other, **against(here[name], here[other])}
                        for method, other in others.items()
                    },
                }
            )
    return records


def _median_rate(rounds: Rounds) -> float:
    return statistics.median(level.rate for level in rounds.values())


def _whole(rounds: Rounds, plain: Rounds) -> dict[str, Any]:
    """What the server counts, which knows of no turns, and what all answers have in common."""
    levels = list(rounds.values())
    answered = [r for level in levels for r in level.answered]
    drafts = sum(v.counters.drafts for v in levels)
    tokens = sum(v.tokens for v in levels)
    accepted = sum(v.counters.accepted for v in levels)
    same, compared = equal(rounds, plain)
    rates = [level.rate for level in levels]
    return {
        "rounds": len(rounds),
        "sessions": sum(len({r.prompt for r in v.replies}) for v in levels),
        "answers": len(answered),
        "failed": sum(bool(r.error) for v in levels for r in v.replies),
        "tokens": tokens,
        "answer_tokens_p50": percentile([len(r.tokens) for r in answered], 50),
        "loop_share": over(sum(loops(r.tokens) for r in answered), len(answered)),
        "tok_per_s": statistics.median(rates),
        "tok_per_s_range": [min(rates), max(rates)],
        "tok_per_cpu_s": median(level.per_cpu_s for level in levels),
        "mean_accepted": over(accepted, drafts),
        "mean_drafted": over(sum(v.counters.drafted for v in levels), drafts),
        "cycles_per_1k": over(1e3 * (tokens - accepted), tokens),
        "steps_per_1k": over(1e3 * sum(v.counters.steps for v in levels), tokens),
        "prompt_tokens_cached_share": over(
            sum(v.counters.cached_prompt_tokens for v in levels),
            sum(v.counters.prompt_tokens for v in levels),
        ),
        "equal_to_none": same,
        "compared_with_none": compared,
    }


def figures(rounds: Rounds, group: str) -> dict[str, Any]:
    """What clients saw of the answers in a group: seconds and milliseconds as their names say.

    An answer comes in pieces, one for each cycle unless the server fell behind with sending:
    ``piece_ms`` are the times between them, ``ms_per_token_p50`` the pace of an answer after its
    first piece.
    """
    kept = [r for v in rounds.values() for r in v.answered if GROUPS[group](r)]
    waits = [1e3 * w for r in kept for w in pieces(r)]
    tokens = sum(len(r.tokens) for r in kept)
    return {
        "answers": len(kept),
        "tokens": tokens,
        "tok_per_s_each": over(tokens, sum(r.latency_s for r in kept)),
        "ttft_p50_s": percentile([r.ttft_s for r in kept], 50),
        "ttft_p99_s": percentile([r.ttft_s for r in kept], 99),
        "ms_per_token_p50": percentile(paces(kept), 50),
        "ms_per_token_p99": percentile(paces(kept), 99),
        "piece_ms_p50": percentile(waits, 50),
        "piece_ms_p99": percentile(waits, 99),
        "tokens_per_piece": over(tokens, len(waits) + len(kept)),
        "latency_p50_s": percentile([r.latency_s for r in kept], 50),
        "latency_p95_s": percentile([r.latency_s for r in kept], 95),
    }


def paces(replies: Iterable[Reply]) -> list[float]:
    """Milliseconds a token after each answer's first piece, of those with more than one token."""
    return [
        1e3 * (r.latency_s - r.ttft_s) / (len(r.tokens) - 1) for r in replies if len(r.tokens) > 1
    ]


def pieces(reply: Reply) -> list[float]:
    """Seconds between the pieces that an answer came in."""
    came = sorted(set(reply.arrivals_s))
    return [after - before for before, after in itertools.pairwise(came)]


def against(mine: Rounds, theirs: Rounds) -> dict[str, Any]:
    """Ratios of one configuration's rates to another's.

    Of each group those of answers, by the clock, with the 95% interval over sessions; of the server
    whole ``rate``, by the clock, and ``cpu``, by processor time, which other work on the machine
    disturbs less: medians over rounds, with their range.
    """
    return {
        **{group: paired(mine, theirs, group) for group in GROUPS},
        "rate": _by_round(mine, theirs, lambda level: level.rate),
        "cpu": _by_round(mine, theirs, lambda level: level.per_cpu_s),
    }


def _by_round(mine: Rounds, theirs: Rounds, of: Callable[[Level], float | None]) -> dict[str, Any]:
    pairs = [(of(mine[r]), of(theirs[r])) for r in mine if r in theirs]
    shared = [a / b for a, b in pairs if a and b]
    return {
        "ratio": median(shared),
        "range": [min(shared), max(shared)] if shared else None,
        "rounds": len(shared),
    }


def paired(mine: Rounds, theirs: Rounds, group: str) -> dict[str, Any]:
    """Ratio of tokens a second over the answers of a group that both gave, paired by session."""
    left, right = _by_place(mine), _by_place(theirs)
    kept = GROUPS[group]
    both = [p for p in left if p in right and kept(left[p]) and kept(right[p])]
    sessions = sorted({name for _, name, _ in both})
    a, b = (
        [_spent(by_place[p] for p in both if p[1] == name) for name in sessions]
        for by_place in (left, right)
    )
    own, other, interval = rate(a), rate(b), ratio_interval(a, b)
    return {
        "ratio": over(own, other),
        "interval": None if interval is None else list(interval),
        "sessions": len(sessions),
    }


def _by_place(rounds: Rounds) -> dict[Place, Reply]:
    return {
        (number, reply.prompt, reply.turn): reply
        for number, level in rounds.items()
        for reply in level.answered
    }


def _spent(replies: Iterable[Reply]) -> tuple[float, float]:
    found = list(replies)
    return sum(len(r.tokens) for r in found), 1e6 * sum(r.latency_s for r in found)


def equal(mine: Rounds, plain: Rounds) -> tuple[int, int]:
    """Answers that equal those without speculation token for token, of those compared.

    After the first that differs the two sessions say different things, so no later one counts.
    """
    left, right = _by_place(mine), _by_place(plain)
    same = compared = 0
    parted: set[tuple[int, str]] = set()
    for number, name, turn in sorted(left.keys() & right.keys()):
        if (number, name) in parted:
            continue
        compared += 1
        if left[number, name, turn].tokens == right[number, name, turn].tokens:
            same += 1
        else:
            parted.add((number, name))
    return same, compared


WIDTH: Final = 180
"""Columns that a table takes."""


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    """One table for each concurrency; a star marks the best of a method, which others are held to.

    ``/suffix`` and the like are ratios to the best of that method with their intervals.
    """
    shown = []
    for concurrency in sorted({r["concurrency"] for r in records}):
        here = [r for r in records if r["concurrency"] == concurrency]
        found = {r["method"] for r in here}
        left_out = set() if "variant" in found else {"hybrid"}
        methods = [m for m in BASELINES if m in found - left_out]
        table = Table(
            title=f"{concurrency} at a time", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        turns = any(r["groups"]["warm"]["answers"] for r in here)
        table.add_column("configuration", no_wrap=True)
        for column in (
            "tok/s", *(f"/{m}" for m in methods), "cpu/none", "TTFT s", *["warm"] * turns,
            "ms/tok", "piece p99", "acc.", "=none",
        ):  # fmt: skip
            table.add_column(column, justify="right", no_wrap=True)
        for r in here:
            every, warm, to = r["groups"]["all"], r["groups"]["warm"], r["against"]
            plain, speculates = to.get("none"), r["method"] != "none"
            table.add_row(
                r["configuration"] + (" *" if r["best_of_method"] and r["k"] else ""),
                f"{r['tok_per_s']:.1f}",
                *(_ratio(to[m]["all"]) if m in to else "" for m in methods),
                _figure(plain["cpu"]["ratio"]) if plain else "",
                _figure(every["ttft_p50_s"]),
                *[_figure(warm["ttft_p50_s"])] * turns,
                _figure(every["ms_per_token_p50"], 0),
                _figure(every["piece_ms_p99"], 0),
                _figure(r["mean_accepted"]) if speculates else "",
                f"{r['equal_to_none']}/{r['compared_with_none']}" if speculates else "",
            )
        shown.append(table)
    return shown


def _ratio(found: dict[str, Any]) -> str:
    said = _figure(found["ratio"])
    between = found["interval"]
    return said if between is None else f"{said} ({between[0]:.2f}-{between[1]:.2f})"


def _figure(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
