"""Labelled drafts in columns: what every step of learning reads, and a scope's memory of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import DraftEvent, EventBatch
from decoder.contracts.features import NUM_FEATURES
from decoder.contracts.trials import OWN_DRAFTS
from decoder.policy.rule import ARMS

UNKNOWN: Final = len(ARMS)
"""Arms that came after this reader. Their drafts have labels like all others; of what a step of
theirs costs nothing is learned."""


@dataclass(frozen=True)
class Rows:
    """``n`` labelled drafts, oldest first. Lengths in tokens, times in microseconds.

    ``accepted`` is a lower bound where ``censored``. ``model_expected`` is what the worker expected
    of a model draft; ``model_accepted`` is NaN where none was verified. ``step_us`` and
    ``step_tokens`` belong to the whole batch of ``batch_size`` requests that shared the step.
    ``rate`` is NaN where another parameter was in force.
    """

    request: NDArray[np.uint64]  # [n] hash of the request's opaque id
    session: NDArray[np.uint64]  # [n] of its session's, or of the request's where it has none
    time: NDArray[np.float64]  # [n] seconds since the epoch, at the decision
    rate: NDArray[np.float32]  # [n] the worker's live rate, tokens in the time of a plain step
    features: NDArray[np.float32]  # [n, NUM_FEATURES]
    accepted: NDArray[np.float32]  # [n]
    censored: NDArray[np.bool_]  # [n]
    arm: NDArray[np.int8]  # [n] index into policy.rule.ARMS, or UNKNOWN
    draft_len: NDArray[np.int32]  # [n]
    verified_len: NDArray[np.int32]  # [n] draft tokens of either arm
    model_expected: NDArray[np.float32]  # [n]
    model_accepted: NDArray[np.float32]  # [n]
    batch_size: NDArray[np.int32]  # [n] at least 1
    step_tokens: NDArray[np.int32]  # [n]
    step_us: NDArray[np.float64]  # [n]

    def __len__(self) -> int:
        return len(self.request)

    def part(self, first: int, last: int) -> Rows:
        """The rows from ``first`` to before ``last``; views."""
        return Rows(**{name: getattr(self, name)[first:last] for name in COLUMNS})

    def take(self, index: NDArray[Any]) -> Rows:
        """The rows at ``index`` (integers, or a mask of length n), copied."""
        places = np.flatnonzero(index) if index.dtype == bool else index
        return Rows(**{name: getattr(self, name).take(places, axis=0) for name in COLUMNS})


_KINDS: Final = {
    name: get_args(get_args(kind)[1])[0] for name, kind in get_type_hints(Rows).items()
}
COLUMNS: Final = tuple(_KINDS)


def empty(n: int = 0) -> Rows:
    """``n`` rows of zeros: the storage of a buffer."""
    wide = {"features": (n, NUM_FEATURES)}
    return Rows(**{name: np.zeros(wide.get(name, n), kind) for name, kind in _KINDS.items()})


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all ``parts``, at least one, in their order."""
    return Rows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS})


class Buffer:
    """A ring of at most ``capacity`` rows; ``total`` counts those ever added.

    A row's number is ``total`` when it came.
    """

    def __init__(self, capacity: int, held: Rows | None = None, total: int = 0) -> None:
        """``held``: the newest of ``total`` rows that came before."""
        self.capacity = capacity
        self.total = total
        self._held = 0
        self._ring = empty(capacity)
        if held is not None:
            fit = held.part(max(len(held) - capacity, 0), len(held))
            self.total -= len(fit)
            self.add(fit)

    def __len__(self) -> int:
        return self._held

    def add(self, rows: Rows) -> None:
        """Store ``rows``, at most ``capacity`` of them, over the oldest. Mutates."""
        slots = (self.total + np.arange(len(rows))) % self.capacity
        for name in COLUMNS:
            getattr(self._ring, name)[slots] = getattr(rows, name)
        self.total += len(rows)
        self._held = min(self._held + len(rows), self.capacity)

    def times(self) -> dict[str, float]:
        """``time_from`` and ``time_to`` of what is held, in seconds since the epoch."""
        held = self._ring.time[np.arange(self.total - len(self), self.total) % self.capacity]
        return {"time_from": float(held.min()), "time_to": float(held.max())} if len(held) else {}

    def recent(self, last: int) -> Rows:
        """The newest rows, at most ``last``, oldest first, copied."""
        held = min(len(self), last)
        begins, ends = (self.total - held) % self.capacity, self.total % self.capacity
        if held and ends <= begins:
            return joined([self._ring.part(begins, self.capacity), self._ring.part(0, ends)])
        return joined([self._ring.part(begins, ends)])

    def at(self, numbers: NDArray[np.int64]) -> Rows:
        """The rows of these ``numbers``, each among the newest ``capacity``, copied."""
        return self._ring.take(numbers % self.capacity)


def hash_id(text: str) -> int:
    """A 64-bit hash of an id that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def from_events(events: Sequence[DraftEvent]) -> Rows:
    """The columns of those ``events`` that have a cache draft within the worker's own limits, in
    their order."""
    drafts = [e for e in events if e.features is not None and e.side in OWN_DRAFTS]
    if not drafts:
        return empty()
    columns = dict(zip(DraftEvent._fields, zip(*drafts, strict=True), strict=True))
    columns["model_accepted"] = tuple(np.nan if n is None else n for n in columns["model_accepted"])
    return _rows(columns)


def from_batch(batch: EventBatch) -> Rows:
    """What :func:`from_events` makes of the batch's events, column by column."""
    rows = _rows({**batch.numbers, **batch.names, "features": batch.features})
    return rows.take(taught_by(batch))


def taught_by(batch: EventBatch) -> NDArray[np.bool_]:
    """Which of the batch's events, [n], are rows."""
    own = np.array([side in OWN_DRAFTS for side in batch.names["side"]])
    taught: NDArray[np.bool_] = (batch.numbers["draft_len"] > 0) & own
    return taught


def _rows(columns: Mapping[str, Any]) -> Rows:
    """Of columns [n] by the names that they have in an event."""
    sessions = [s or r for s, r in zip(columns["session"], columns["request"], strict=True)]
    hashes = {name: hash_id(name) for name in {*columns["request"], *sessions}}
    is_rate = np.array([name == "rate" for name in columns["parameter_name"]])
    made = {
        **columns,
        "request": [hashes[name] for name in columns["request"]],
        "session": [hashes[name] for name in sessions],
        "rate": np.where(is_rate, columns["parameter"], np.nan),
        "model_expected": columns["predicted_model"],
        "censored": [bool(reason) for reason in columns["censored"]],
        "arm": [_ARM.get(name, UNKNOWN) for name in columns["arm"]],
    }
    return Rows(**{name: np.asarray(made[name], kind) for name, kind in _KINDS.items()})


_ARM: Final = {name: index for index, name in enumerate(ARMS)}
