"""Draft events as a page needs them: sums by second."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.events import EventBatch

ARMS: Final = ("cache", "model", "none")
OWN: Final = ("", CHAMPION)
"""Sides of steps that the policy in force decided: outside of trials, and in its blocks of them."""
KEPT_NUMBERS: Final = 100_000
"""Events whose numbers are remembered: a record that is sent twice comes within seconds."""

Sums = NDArray[np.float64]
"""[7]: cycles by arm, tokens accepted of cache and model, absolute errors, and of how many."""


@dataclass(frozen=True)
class Window:
    """What the policy in force made of a stretch of time."""

    events: int
    arm_shares: dict[str, float]
    accepted_by_arm: dict[str, float]  # accepted draft tokens per cycle of that arm
    mae: float | None  # predicted against accepted, tokens; None without a complete label


class Drafts:
    """What became of drafts. ``seen`` are distinct events, of all sides; sums older than ``keep_s``
    are forgotten."""

    def __init__(self, keep_s: float = math.inf) -> None:
        self.keep_s = keep_s
        self.seen = 0
        self._seconds: dict[int, Sums] = {}
        self._numbers: dict[tuple[str, int], None] = {}

    def add(self, batch: EventBatch) -> None:
        """Count the events of ``batch``, each once."""
        numbers, arms = batch.numbers, np.array(batch.names["arm"])
        fresh = self._fresh(batch)
        self.seen += int(fresh.sum())
        is_whole = np.array([not reason for reason in batch.names["censored"]], np.bool_)
        complete = is_whole & (numbers["draft_len"] > 0)
        from_cache = np.minimum(numbers["accepted"], numbers["verified_len"])
        from_model = np.nan_to_num(numbers["model_accepted"])
        error = np.abs(numbers["predicted"] - numbers["accepted"])
        columns = [arms == arm for arm in ARMS]
        columns += [np.where(columns[0], from_cache, 0), np.where(columns[1], from_model, 0)]
        columns += [np.where(complete, error, 0.0), complete]
        own = fresh & np.isin(batch.names["side"], OWN)
        seconds, rows = numbers["time"][own].astype(int), np.column_stack(columns)[own]
        for second in np.unique(seconds).tolist():
            sums = rows[seconds == second].sum(axis=0, dtype=np.float64)
            self._seconds[second] = self._seconds.get(second, 0.0) + sums
        if len(self._seconds) > 2 * self.keep_s:
            # neither too old nor of a time to come, which would never grow old
            now = time.time()
            kept = {s: sums for s, sums in self._seconds.items() if abs(now - s) <= self.keep_s}
            self._seconds = kept

    def windows(self, bounds: Sequence[tuple[float, float]]) -> list[Window]:
        """What happened between each of ``bounds``, seconds since the epoch, in whole seconds."""
        known = sorted(self._seconds.items(), key=lambda item: item[0])
        totals = np.cumsum([np.zeros(7), *(sums for _, sums in known)], axis=0)
        at = np.searchsorted([second for second, _ in known], np.reshape(bounds, (-1, 2)))
        found = []
        for *cycles, cached, drafted, error, labels in np.diff(totals[at], axis=1)[:, 0].tolist():
            total = sum(cycles)
            shares = {arm: n / max(total, 1.0) for arm, n in zip(ARMS, cycles, strict=True)}
            accepted = {"cache": cached / max(cycles[0], 1.0)}
            accepted["model"] = drafted / max(cycles[1], 1.0)
            found.append(Window(int(total), shares, accepted, error / labels if labels else None))
        return found

    def _fresh(self, batch: EventBatch) -> NDArray[np.bool_]:
        fresh = np.zeros(len(batch), np.bool_)
        for row, number in enumerate(batch.numbers["number"].tolist()):
            fresh[row] = (batch.origin.life, number) not in self._numbers
            self._numbers[batch.origin.life, number] = None
        while len(self._numbers) > KEPT_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return fresh
