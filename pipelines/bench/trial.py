"""``hvd bench trial``: does a comparison by turns say what is so, and how much text does it take?

The real router decodes recordings, sides decide by the real lots, and a step takes what a cost
table says times a noise that was measured on this machine, in the order it came. So a whole run is
seconds, and what is true is known: each side is decoded alone as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from decoder.contracts.bundle import CHAMPION, TRIAL, Policy
from decoder.contracts.features import TOKEN_CLASSES
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX
from decoder.costs import LiveCosts
from decoder.policy.pricing import CostTable, step_time
from decoder.router import DraftRouter
from decoder.settings import WorkerSettings
from decoder.telemetry.queue import EventQueue
from decoder.trial.block import Made
from decoder.trial.effect import FEWEST, effect
from decoder.trial.sides import STOCK, Side
from decoder.trial.turns import Turns
from pipelines.replay.dialogue import DialogueCache
from pipelines.replay.engine import Engine
from pipelines.replay.traces import Trace

Floats = NDArray[np.float64]

RUNS: Final = 200
ROUNDS: Final = 300
"""Rounds of a run of the A/A test: it is looked at after each."""
EFFECTS: Final = (0.20, 0.05, 0.02)
POWER_RUNS: Final = 9
MOST_ROUNDS: Final = 8_000
"""Rounds after which an effect counts as not seen."""
EVERY: Final = 0.02
"""Growth of the rounds between two looks for an effect."""
COSTS: Final = CostTable("nominal CPU", (1, 4096), (30e3, 30e3 + 500.0 * 4095), 2e3, 2e3)
"""Microseconds of a small model on a small machine: what counts is the ratio of its entries."""
HOLDOUT: Final = 0.3
"""Part of the steps of the sides that are also decoded alone."""
PASSES: Final = 8
"""Times that the recordings are decoded by turns, each with other lots."""
SPREAD: Final = 0.1
"""Of a step's logarithm, where no noise was measured."""


@dataclass(frozen=True)
class Steps:
    """Steps of one side decoding recordings alone, in their order: tokens [n], microseconds [n]."""

    tokens: NDArray[np.int64]
    us: Floats

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return float(self.tokens.sum() / self.us.sum() * 1e6)


@dataclass(frozen=True)
class Seen:
    """What it took until the interval lay above 1: median over runs, None where most never did."""

    percent: float
    seen: int
    runs: int
    rounds: float | None
    steps: float | None


@dataclass
class Found:
    """Figures of ``hvd bench trial``."""

    recordings: int
    noise: str
    excluded: int = 0
    runs: int = 0
    rounds: int = 0
    power: list[Seen] = field(default_factory=list)
    sides: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


class _Noted(Turns):
    """Turns by the recorded clock in the place of the wall's; ``kept`` are tokens and time of each
    round's blocks, by side."""

    def __init__(self, names: Sequence[str], policy: Policy, seed: int) -> None:
        super().__init__(names, HOLDOUT, {}, policy, seed)
        self.us = 0.0
        self.kept: list[dict[str, tuple[float, float]]] = []

    def book(self, side: Side | None, made: Made, counts: bool) -> None:
        """Book what the recorded machine took."""
        super().book(side, made._replace(us=self.us, cost_us=self.us, late_us=0.0), counts)
        while self.rounds:
            accounts = self.rounds.popleft().accounts
            self.kept.append({a.side.name: (a.tokens, a.us) for a in accounts})


class _Always(Turns):
    """One side decides all the time."""

    def __init__(self, side: Side) -> None:
        super().__init__((), 0.0, {}, side.policy, seed=1)
        self._side = side

    def next(self, champion: Policy) -> Side | None:
        """That side."""
        return self._side


def decode(traces: Sequence[Trace], policy: Policy, dealt: Turns | None = None) -> Steps:
    """Decode recordings one after the other; the steps they took.

    Args:
        dealt: sides that decide in the place of ``policy``.
    """
    cache = DialogueCache(WorkerSettings.load())
    has_model = all(trace.model_accepted is not None for trace in traces)
    top = max(int(max(*t.prompt, *t.output)) for t in traces) + 1
    router = DraftRouter(
        cache, policy, np.zeros((top, len(TOKEN_CLASSES)), np.float32), EventQueue(0), has_model,
        costs=LiveCosts(COSTS, live=False), turns=dealt,
    )  # fmt: skip
    tokens, us = [], []
    engine = Engine(router, cache, traces, has_model)
    for index in range(len(traces)):
        for cycle in engine.decode(index):
            tokens.append(cycle.committed)
            us.append(step_time(COSTS, 1, cycle.verified, cycle.drafted))
            if isinstance(dealt, _Noted):
                dealt.us = us[-1]
    return Steps(np.array(tokens), np.array(us))


@dataclass(frozen=True)
class Rounds:
    """Rounds of a side against the champion, which is the same: tokens and time of its blocks
    [n, 2], of the champion's [n, 2], and the steps decoded by then [n]."""

    mine: Floats
    other: Floats
    steps: NDArray[np.int64]

    def seen(self, faster: float = 0.0, every: float = 0.0) -> int:
        """Rounds until the interval excludes 1, the side being faster by that share; 0: never.

        Args:
            every: looked at when there are more rounds by that share; after each at 0.
        """
        mine = self.mine / (1.0, 1.0 + faster)
        n = FEWEST
        while n <= len(mine):
            found = effect(mine[:n], self.other[:n])
            if found.low > 1.0 or found.high < 1.0:
                return n
            n = max(n + 1, int(n * (1.0 + every)))
        return 0


def play(steps: Steps, noise: Floats, seed: int, rounds: int) -> Rounds:
    """Deal ``steps`` out to the champion and to itself on trial, over and over.

    Args:
        noise: factors [m] of steps that followed each other, begun anywhere.
    """
    rng = np.random.default_rng(seed)
    champion = Policy("s", 1, 2.0, "frequency")
    trial = Policy("s", 2, 2.0, "frequency", role=TRIAL, share=0.5)
    dealt = Turns((), 0.0, {TRIAL: trial}, champion, seed)
    at, beat, count = int(rng.integers(len(steps.us))), int(rng.integers(len(noise))), 0
    tokens, us, factors = steps.tokens.tolist(), steps.us.tolist(), noise.tolist()
    mine: list[tuple[float, float]] = []
    other: list[tuple[float, float]] = []
    counts: list[int] = []
    while len(mine) < rounds:
        side, took = dealt.next(champion), us[at] * factors[beat]
        dealt.book(side, Made(tokens[at], ("r",), took, took, 0.0, {}), counts=True)
        at, beat, count = (at + 1) % len(us), (beat + 1) % len(factors), count + 1
        while dealt.rounds:
            blocks = {a.side.name: (a.tokens, a.us) for a in dealt.rounds.popleft().accounts}
            mine.append(blocks[TRIAL])
            other.append(blocks[CHAMPION])
            counts.append(count)
    return Rounds(np.array(mine), np.array(other), np.array(counts))


def measure(
    traces: Sequence[Trace],
    policy: Policy,
    noise: Floats | None,
    tick: Callable[[str], None],
    runs: int = RUNS,
    rounds: int = ROUNDS,
) -> Found:
    """All figures. ``noise`` are factors of measured steps; None draws some."""
    told = "measured" if noise is not None else f"drawn, {SPREAD:.0%}"
    if noise is None:
        noise = np.exp(np.random.default_rng(0).normal(0.0, SPREAD, 100_003))
    found = Found(len(traces), told, runs=runs, rounds=rounds)
    tick("decoding the recordings")
    steps = decode(traces, policy)
    for run in range(runs):
        tick(f"a side against itself: run {run + 1} of {runs}")
        found.excluded += play(steps, noise, run, rounds).seen() > 0
    long = []
    for run in range(min(POWER_RUNS, runs)):
        tick(f"a faster side: run {run + 1}")
        long.append(play(steps, noise, 1_000 + run, MOST_ROUNDS))
    for share in EFFECTS:
        hits = [(n, int(r.steps[n - 1])) for r in long if (n := r.seen(share, EVERY))]
        middle = np.median(np.array(hits), axis=0).tolist() if 2 * len(hits) > len(long) else None
        found.power.append(Seen(100 * share, len(hits), len(long), *(middle or (None, None))))
    tick("sides alone, and by turns")
    found.sides = beside_alone(traces, policy, steps)
    return found


def beside_alone(
    traces: Sequence[Trace], policy: Policy, steps: Steps
) -> dict[str, dict[str, float]]:
    """The champion's rate over that of each stock side: decoded alone, and found by turns."""
    has_model = all(trace.model_accepted is not None for trace in traces)
    names = [n for n in (PLAIN, SUFFIX, MODEL) if has_model or n != MODEL]
    kept = []
    for seed in range(PASSES):
        dealt = _Noted(names, policy, seed)
        decode(traces, policy, dealt)
        kept += dealt.kept
    made = {}
    for name in names:
        both = [r for r in kept if name in r]
        by_turns = effect([r[CHAMPION] for r in both], [r[name] for r in both])
        alone = decode(traces, policy, _Always(STOCK[name]))
        made[name] = {
            "alone": steps.rate / alone.rate, "by_turns": by_turns.ratio,
            "low": by_turns.low, "high": by_turns.high, "pairs": by_turns.pairs,
        }  # fmt: skip
    return made


def table(found: Found) -> Table:
    """For a terminal."""
    shown = Table("what", "found", title=f"{found.recordings} recordings, noise {found.noise}")
    share = found.excluded / found.runs
    shown.add_row(
        f"a side against itself, {found.runs} runs of {found.rounds} rounds",
        f"excluded in {found.excluded} ({share:.1%}; at most 5% promised)",
    )
    for seen in found.power:
        what = f"a side {seen.percent:.0f}% faster, seen in {seen.seen} of {seen.runs} runs"
        after = f"after {seen.rounds:.0f} rounds, {seen.steps:.0f} steps" if seen.rounds else "-"
        shown.add_row(what, after)
    for name, side in found.sides.items():
        by_turns = f"{side['by_turns']:.3f} ({side['low']:.3f} to {side['high']:.3f})"
        shown.add_row(f"over {name}, alone", f"{side['alone']:.3f}, by turns {by_turns}")
    return shown
