"""What the policy in force is worth beside other sides of its trial, over all and by phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from decoder.contracts.bundle import CHAMPION, FIRST
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX, Round
from decoder.trial.effect import Effect, effect, effect_of
from pipelines.watch.ledger import Phase

NAMES: Final[Mapping[str, str]] = {
    PLAIN: "plain decoding",
    SUFFIX: "stock suffix decoding",
    MODEL: "EAGLE3 decoding",
    FIRST: "the frozen first policy",
}
"""Sides that the policy in force may be compared with, as they are called."""
FIXED: Final = (PLAIN, SUFFIX, MODEL)
"""Of these, the methods that somebody would have to choose between."""
ALL: Final = "(all)"
RECENT: Final = 24
"""Pairs of a moving estimate: a minute or two of a demo."""


def is_bounded(one: Effect) -> bool:
    """Whether there are pairs enough for an interval."""
    return one.low > 0.0 and math.isfinite(one.high)


def as_dict(one: Effect) -> dict[str, float | int | None]:
    """JSON-ready: ``ratio``, ``low``, ``high`` and ``pairs``; null is not known."""
    bounds = {"low": round(one.low, 4), "high": round(one.high, 4)} if is_bounded(one) else {}
    ratio = round(one.ratio, 4) if one.pairs else None
    return {"ratio": ratio, "low": None, "high": None, "pairs": one.pairs} | bounds


def as_text(one: Effect) -> str:
    """``1.62 (1.51 to 1.74)``; the ratio alone while its interval is open, "-" without any."""
    if is_bounded(one):
        return f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
    return f"about {one.ratio:.2f}" if one.pairs else "-"


def compared(rounds: Sequence[Round]) -> list[str]:
    """Those of :data:`NAMES` that took part; where none did, plain decoding."""
    played = {block.side for one in rounds for block in one.blocks}
    return [side for side in NAMES if side in played] or [PLAIN]


def uplifts(rounds: Sequence[Round], phases: Iterable[Phase]) -> dict[str, dict[str, Effect]]:
    """Rates over each other side's by the clock, by side, of each phase by its name and of
    :data:`ALL`. A round belongs to the phase in which it ended."""
    parts = {p.name: _within(p, rounds) for p in phases} | {ALL: list(rounds)}
    sides = compared(rounds)
    return {n: {s: effect_of(part, CHAMPION, s) for s in sides} for n, part in parts.items()}


def best_and_worst(sides: Mapping[str, Effect]) -> tuple[str, str] | None:
    """Of the fixed methods compared, the one that is nearest to the policy in force or ahead of it,
    and the one furthest behind; None where not two of them have pairs enough."""
    known = {s: e.ratio for s, e in sides.items() if s in FIXED and is_bounded(e)}
    if len(known) < 2:
        return None
    return min(known, key=known.__getitem__), max(known, key=known.__getitem__)


def rate_in(phase: Phase, rounds: Iterable[Round], side: str = CHAMPION) -> float:
    """Tokens a second of ``side`` in its blocks of a phase, by the clock; 0 without any."""
    blocks = [block for one in _within(phase, rounds) if (block := one.block(side))]
    return 1e6 * sum(b.tokens for b in blocks) / max(sum(b.us for b in blocks), 1.0)


def _within(phase: Phase, rounds: Iterable[Round]) -> list[Round]:
    return [one for one in rounds if phase.began <= one.time < phase.ended]


def over_time(
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
    ends = reversed(range(len(both), 0, -stride))
    slices = [(end, slice(max(0, end - (recent or end)), end)) for end in ends]
    seen = [(both[end - 1][0], effect(mine[part], other[part])) for end, part in slices]
    return [(time, one) for time, one in seen if one.pairs]
