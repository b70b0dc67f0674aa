"""Figures of a live scenario, in the form of a study's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import CHAMPION, FIRST
from decoder.contracts.trials import PLAIN, Round, decode_round
from decoder.trial.effect import Effect, effect_of
from pipelines.drift.live.play import Played
from pipelines.drift.live.scenario import Live
from pipelines.drift.measure import NOTICED

POLICIES: Final = {"adaptive": CHAMPION, "first": FIRST, "plain": PLAIN}
"""Policies by their names in a study, and the sides that play them."""


def figures(live: Live, seed: int, played: Played) -> dict[str, Any]:
    """All figures, plain JSON, named as those of a study.

    ``rate`` is over plain decoding in the same rounds, so tokens in the time of a plain step.
    """
    rounds = [decode_round(value.encode()) for value in played.rounds]
    windows = _windows(played, rounds)
    policies: dict[str, dict[str, float | None]] = {}
    for name, side in POLICIES.items():
        over_plain = {window: effect_of(held, side, PLAIN) for window, held in windows.items()}
        policies[name] = {
            "rate" if window == "all" else f"rate_{window}": found.ratio if found.pairs else None
            for window, found in over_plain.items()
        }
    starts = [_number(played, at) for at in played.began]
    changes: list[dict[str, Any]] = [
        {"at": at, "what": ["workloads"], "ramp": 0, "segment": number}
        for number, at in enumerate(starts)
        if number
    ]
    alarms = [_number(played, at) for at in played.alarms]
    noticed = [any(c["at"] <= at < c["at"] + NOTICED for c in changes) for at in alarms]
    return {
        "name": live.name,
        "seed": seed,
        "live": True,
        "about": live.about,
        "requests": len(played.answered),
        "policies": policies,
        "changes": changes,
        "ratios": {
            f"adaptive/{other}": {
                window: _interval(effect_of(held, CHAMPION, POLICIES[other]))
                for window, held in windows.items()
            }
            for other in ("first", "plain")
        },
        "ratios_by_cost": {
            "adaptive/first": {
                window: _interval(effect_of(held, CHAMPION, FIRST, by_cost=True))
                for window, held in windows.items()
            }
        },
        "pairs": {window: len(held) for window, held in windows.items()},
        "recovery_requests": [None] * len(changes),
        "alarms": alarms,
        "false_alarms": noticed.count(False),
        "promotions": [_number(played, at) for at in played.learned],
    }


def _windows(played: Played, rounds: Sequence[Round]) -> dict[str, list[Round]]:
    """Rounds of the whole, ``after`` the last change, and with a learned policy in force."""
    found = {"all": list(rounds)}
    if len(played.began) > 1:
        found["before"] = [r for r in rounds if r.time < played.began[1]]
        found["after"] = [r for r in rounds if r.time >= played.began[-1]]
    if played.learned:
        found["learned"] = [r for r in rounds if r.time >= played.learned[0]]
    return found


def _interval(found: Effect) -> list[float | None]:
    known = np.isfinite(found.high)
    return [found.ratio, found.low if known else None, found.high if known else None]


def _number(played: Played, at: float) -> int:
    """Requests that were answered before ``at``."""
    return int(np.searchsorted(played.answered, at))
