"""Draft events as a page needs them: sums by second, and the last labelled drafts whole."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.events import EventBatch
from decoder.contracts.features import NUM_FEATURES, FloatArray

ARMS: Final = ("cache", "model", "none")
OWN: Final = ("", CHAMPION)
"""Sides of steps that the policy in force decided: outside of trials, and in its blocks of them."""
KEPT_DRAFTS: Final = 4096
"""Labelled drafts kept with their features; of these a calibration has tenths of some hundred."""
KEPT_NUMBERS: Final = 40_000
"""Numbers of events remembered for each life: a record that is sent twice comes within seconds."""
KEPT_LIVES: Final = 64
"""Lives whose numbers are remembered, the ones heard of last; some MB each."""

Sums = NDArray[np.float64]
_WIDTH: Final = 7  # cycles of the three arms, tokens accepted of two, absolute error, labels


@dataclass
class Drafts:
    """What became of drafts; of steps that the policy in force decided, where not said otherwise.

    ``keep_s``: sums and versions older than this are forgotten.
    """

    keep_s: float = math.inf
    seen: int = 0  # distinct events, of all sides
    labels: Counter[str] = field(default_factory=Counter)  # of all sides, censored ones apart
    versions: dict[int, float] = field(default_factory=dict)  # when each first decided
    _seconds: dict[int, Sums] = field(default_factory=dict)
    _numbers: OrderedDict[str, set[int]] = field(default_factory=OrderedDict)
    _recent: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)

    def add(self, batch: EventBatch) -> None:
        """Count the events of ``batch``, each once."""
        fresh = self._fresh(batch.origin.life, batch.numbers["number"].tolist())
        names, numbers = batch.names, batch.numbers
        self.seen += int(fresh.sum())
        drafted = fresh & (numbers["draft_len"] > 0)
        censored = np.array([bool(reason) for reason in names["censored"]])
        for row in np.flatnonzero(drafted).tolist():
            self.labels[names["label"][row] + (" censored" if censored[row] else "")] += 1
        complete = drafted & ~censored
        if complete.any():
            accepted = numbers["accepted"][complete].astype(np.float32)
            self._keep(batch.features[complete], accepted)
        own = fresh & np.array([side in OWN for side in names["side"]])
        self._sum(batch, own, complete)
        known = len(self.versions)
        for row in np.flatnonzero(own).tolist():
            if names["role"][row] == CHAMPION:
                version, at = int(numbers["policy_version"][row]), float(numbers["time"][row])
                self.versions.setdefault(version, at)
        if len(self.versions) > known and self.keep_s < math.inf:
            self.versions = {v: at for v, at in self.versions.items() if self._is_kept(at)}

    def between(self, began: float, ended: float) -> Sums:
        """Sums [7] from ``began`` to ``ended``, seconds since the epoch, in whole seconds: cycles
        by arm, draft tokens accepted in those of cache and model, the sum of absolute errors of
        predicted lengths, and of how many labels."""
        seconds = self._seconds
        if ended - began < len(seconds):
            near = range(math.ceil(began), math.ceil(ended))
            inside = [sums for at in near if (sums := seconds.get(at)) is not None]
        else:
            inside = [sums for at, sums in list(seconds.items()) if began <= at < ended]
        return np.sum(inside, axis=0) if inside else np.zeros(_WIDTH)

    @property
    def recent(self) -> tuple[FloatArray, FloatArray]:
        """Features [n, features] and accepted lengths [n] of the last labelled drafts, whoever
        decided: the label of a draft does not depend on that."""
        pieces = list(self._recent)
        if not pieces:
            return np.zeros((0, NUM_FEATURES), np.float32), np.zeros(0, np.float32)
        features, accepted = zip(*pieces, strict=True)
        return np.concatenate(features)[-KEPT_DRAFTS:], np.concatenate(accepted)[-KEPT_DRAFTS:]

    def _fresh(self, life: str, numbers: list[int]) -> NDArray[np.bool_]:
        known = self._numbers.setdefault(life, set())
        self._numbers.move_to_end(life)
        if len(self._numbers) > KEPT_LIVES:
            self._numbers.popitem(last=False)
        fresh = np.zeros(len(numbers), np.bool_)
        for row, number in enumerate(numbers):
            fresh[row] = number not in known
            known.add(number)
        if len(known) > KEPT_NUMBERS:
            newest = max(known)
            self._numbers[life] = {n for n in known if n > newest - KEPT_NUMBERS // 2}
        return fresh

    def _keep(self, features: FloatArray, accepted: FloatArray) -> None:
        self._recent.append((features, accepted))
        while sum(len(a) for _, a in self._recent[1:]) >= KEPT_DRAFTS:
            del self._recent[0]

    def _sum(self, batch: EventBatch, own: NDArray[np.bool_], complete: NDArray[np.bool_]) -> None:
        numbers = batch.numbers
        arms = np.array(batch.names["arm"])
        rows = np.zeros((len(batch), _WIDTH))
        for column, arm in enumerate(ARMS):
            rows[:, column] = arms == arm
        verified = np.minimum(numbers["accepted"], numbers["verified_len"])
        rows[:, 3] = np.where(arms == ARMS[0], verified, 0)
        rows[:, 4] = np.where(arms == ARMS[1], np.nan_to_num(numbers["model_accepted"]), 0)
        error = np.abs(numbers["predicted"] - numbers["accepted"])
        rows[:, 5] = np.where(complete, error, 0.0)
        rows[:, 6] = complete
        for second, row in zip(numbers["time"][own].astype(int).tolist(), rows[own], strict=True):
            self._seconds[second] = self._seconds.get(second, 0.0) + row
        if len(self._seconds) > 2 * self.keep_s:
            self._seconds = {s: sums for s, sums in self._seconds.items() if self._is_kept(s)}

    def _is_kept(self, at: float) -> bool:
        """Whether it is neither too old nor of a time to come, which would never grow old."""
        return abs(time.time() - at) <= self.keep_s
