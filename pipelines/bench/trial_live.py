"""A side against itself on the embedded model: the reference engine, the real clock, no broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from decoder.contracts.bundle import ANY_SCOPE, CHAMPION, TRIAL
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX
from decoder.costs import LiveCosts
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.method import method
from decoder.engines.reference.profile import profile
from decoder.engines.reference.session import Session
from decoder.floor import Floor
from decoder.policy.first import first_policy
from decoder.trial.block import Made
from decoder.trial.effect import Effect, effect
from decoder.trial.sides import Side
from decoder.trial.turns import Turns
from pipelines import embedded, workloads

MAX_TOKENS: Final = 96
SHARES: Final = 0.3, 0.3
"""Of the same policy on trial, and of the stock sides together."""


@dataclass(frozen=True)
class Live:
    """Effects over the champion's own rate, by wall time; ``itself`` should hold 1."""

    minutes: float
    rounds: int
    itself: Effect
    itself_by_cost: Effect
    over: dict[str, Effect]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


class Noting(Turns):
    """Turns that keep every round, and what each step took over what it costs."""

    def __init__(self, names: tuple[str, ...], holdout: float, **arguments: Any) -> None:
        super().__init__(names, holdout, **arguments)
        self.kept: list[dict[str, tuple[float, float, float]]] = []
        self.factors: list[float] = []

    def book(self, side: Side | None, made: Made, counts: bool) -> None:
        """Book a step, and note it."""
        super().book(side, made, counts)
        if counts and made.cost_us > 0:
            self.factors.append(made.us / made.cost_us)
        while self.rounds:
            accounts = self.rounds.popleft().accounts
            self.kept.append({a.side.name: (a.tokens, a.us, a.cost_us) for a in accounts})

    def over(self, mine: str, other: str, by_cost: bool = False) -> Effect:
        """Rate of one side over another's."""
        both = [r for r in self.kept if mine in r and other in r]
        at = 2 if by_cost else 1
        return effect(
            [(r[mine][0], r[mine][at]) for r in both], [(r[other][0], r[other][at]) for r in both]
        )


def play(minutes: float, tick: Callable[[str], None]) -> Noting:
    """Decode the workloads for so many minutes, the champion on trial against itself.

    Raises:
        ModelError: the embedded model or its drafter is not installed.
    """
    drafter = embedded.ensure_drafter()
    tick("loading the embedded model")
    engine = ReferenceEngine.load(str(embedded.ensure_model()), drafter)
    policy = first_policy(ANY_SCOPE)
    how = method("hybrid", policy=policy)
    session = Session(engine, how, LiveCosts(profile(engine, how)), Floor(has_model=True))
    trial = replace(policy, role=TRIAL, share=SHARES[0])
    dealt = Noting((PLAIN, SUFFIX, MODEL), SHARES[1], held={TRIAL: trial}, first=policy, seed=1)
    session.router.turns = dealt
    ends = time.monotonic() + 60.0 * minutes
    for prompt in _prompts(engine):
        if time.monotonic() > ends:
            break
        session.generate(prompt, MAX_TOKENS)
        tick(f"{len(dealt.kept)} rounds")
    return dealt


def told(dealt: Noting, minutes: float) -> Live:
    """The figures of what was played."""
    return Live(
        minutes, len(dealt.kept), dealt.over(TRIAL, CHAMPION),
        dealt.over(TRIAL, CHAMPION, by_cost=True),
        {name: dealt.over(CHAMPION, name) for name in (PLAIN, SUFFIX, MODEL)},
    )  # fmt: skip


def noise_of(dealt: Noting) -> NDArray[np.float64]:
    """Factors of steps in their order, about 1; without the tenth of a percent that is furthest
    off, which the machine's other work made."""
    factors: NDArray[np.float64] = np.array(dealt.factors) / np.median(dealt.factors)
    low, high = np.quantile(factors, [0.0005, 0.9995])
    kept: NDArray[np.float64] = factors[(factors >= low) & (factors <= high)]
    return kept


def _prompts(engine: ReferenceEngine) -> Iterator[list[int]]:
    for prompt in workloads.interleaved():
        ids = engine.tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        if len(ids) + MAX_TOKENS < engine.max_model_len:
            yield ids


def table(live: Live) -> Table:
    """For a terminal."""
    shown = Table("what", "ratio", "pairs", title=f"{live.minutes:g} minutes, {live.rounds} rounds")
    rows = {"itself": live.itself, "itself, by cost": live.itself_by_cost, **live.over}
    for name, e in rows.items():
        shown.add_row(f"over {name}", f"{e.ratio:.3f} ({e.low:.3f} to {e.high:.3f})", str(e.pairs))
    return shown
