"""What the policy in force is worth beside other sides of its trial, over all and by phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import CHAMPION, FIRST
from decoder.contracts.trials import PLAIN, SUFFIX, Block, Round
from decoder.trial.effect import Effect, effect, effect_of
from pipelines.watch.ledger import Phase

OVER: Final[Mapping[str, str]] = {
    "over_plain": PLAIN,
    "over_suffix": SUFFIX,
    "over_first_policy": FIRST,
}
"""Comparisons by name, with the side that the policy in force may be compared with."""
NAMED: Final[Mapping[str, str]] = {
    "over_plain": "plain decoding",
    "over_suffix": "stock suffix decoding",
    "over_first_policy": "the frozen first policy",
}
RECENT: Final = 24
"""Pairs of a moving estimate: a minute or two of a demo."""


@dataclass(frozen=True)
class Uplift:
    """Rate over another side's, by the clock; ``at_costs`` is the same by the costs in force."""

    whole: Effect
    at_costs: Effect
    phases: Mapping[str, Effect]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; an end that is not known is null."""
        phases = {name: bounds(one) for name, one in self.phases.items()}
        return {**bounds(self.whole), "at_costs": bounds(self.at_costs), "phases": phases}


def is_bounded(one: Effect) -> bool:
    """Whether there are pairs enough for an interval."""
    return one.low > 0.0 and math.isfinite(one.high)


def bounds(one: Effect) -> dict[str, float | int | None]:
    """``ratio``, ``low``, ``high`` and ``pairs``; None where there is nothing to go by."""
    known = is_bounded(one)
    return {
        "ratio": round(one.ratio, 4) if one.pairs else None,
        "low": round(one.low, 4) if known else None,
        "high": round(one.high, 4) if known else None,
        "pairs": one.pairs,
    }


def compared(rounds: Sequence[Round]) -> dict[str, str]:
    """Those of :data:`OVER` whose side took part; where none did, plain decoding."""
    played = {block.side for one in rounds for block in one.blocks}
    found = {name: side for name, side in OVER.items() if side in played}
    return found or {"over_plain": PLAIN}


def uplifts(rounds: Sequence[Round], phases: Iterable[Phase]) -> dict[str, Uplift]:
    """Every comparison that was made. A round belongs to the phase in which it ended."""
    found = {}
    stretches = list(phases)
    for name, side in compared(rounds).items():
        found[name] = Uplift(
            effect_of(rounds, CHAMPION, side),
            effect_of(rounds, CHAMPION, side, by_cost=True),
            {
                p.name: effect_of([r for r in rounds if _within(r, p)], CHAMPION, side)
                for p in stretches
            },
        )
    return found


def _within(one: Round, phase: Phase) -> bool:
    return phase.began <= one.time < phase.ended


def by_workload(rounds: Sequence[Round]) -> dict[str, dict[str, Effect]]:
    """Every comparison for the requests of each workload, all tenants together, at the costs in
    force: a step's time belongs to all its requests."""
    names = {g.workload for r in rounds for b in r.blocks for g in b.groups}
    found: dict[str, dict[str, Effect]] = {}
    for workload in sorted(names):
        shares = [{b.side: _of(b, workload) for b in r.blocks} for r in rounds]
        found[workload] = {
            name: effect(
                [one[CHAMPION] for one in shares if CHAMPION in one and side in one],
                [one[side] for one in shares if CHAMPION in one and side in one],
            )
            for name, side in compared(rounds).items()
        }
    return found


def _of(block: Block, workload: str) -> tuple[float, float]:
    """Tokens and microseconds of a block that are a workload's; 0 and 0 are no pair."""
    mine = [group for group in block.groups if group.workload == workload]
    return sum(group.tokens for group in mine), sum(group.cost_us for group in mine)


def course(
    rounds: Sequence[Round], side: str, points: int, recent: int | None = None
) -> list[tuple[float, Effect]]:
    """The rate over ``side``'s as it was known at up to ``points`` times, oldest first.

    Args:
        recent: go by the last so many pairs alone; None: by all until then.
    """
    pairs = [(r.time, r.block(CHAMPION), r.block(side)) for r in rounds]
    both = [(time, a, b) for time, a, b in pairs if a is not None and b is not None]
    mine = np.array([(a.tokens, a.us) for _, a, _ in both])
    other = np.array([(b.tokens, b.us) for _, _, b in both])
    stride = max(1, math.ceil(len(both) / points))
    seen = []
    for end in reversed(range(len(both), 0, -stride)):
        begin = max(0, end - (recent or end))
        seen.append((both[end - 1][0], effect(mine[begin:end], other[begin:end])))
    return [(time, one) for time, one in seen if one.pairs]


def shown(one: Effect) -> str:
    """``1.62 (1.51 to 1.74)``; the ratio alone while its interval is open, "-" without any."""
    if not one.pairs:
        return "-"
    if not is_bounded(one):
        return f"about {one.ratio:.2f}"
    return f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
