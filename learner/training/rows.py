"""Training rows: labelled drafts in columns, and a scope's ring buffer of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import EventBatch
from decoder.contracts.features import NUM_FEATURES
from decoder.contracts.trials import OWN_DRAFTS
from decoder.policy.rule import ARMS

UNKNOWN: Final = len(ARMS)
"""Arms of later releases: their drafts have labels, but their steps tell nothing of costs."""


@dataclass(frozen=True)
class Rows:
    """``n`` labelled drafts, oldest first. Lengths in tokens, times in microseconds.

    ``accepted`` is a lower bound where ``censored``. ``model_expected`` is the worker's prediction
    for a model draft; ``model_accepted`` is NaN where none was verified. ``step_us`` and
    ``step_tokens`` are of the whole step of ``batch_size`` requests. ``rate`` is NaN where another
    parameter was in force.
    """

    request: NDArray[np.uint64]  # [n] hash of the request's opaque id
    session: NDArray[np.uint64]  # [n] hash of its session's id, or of the request's without one
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
        """Views of the rows from ``first`` to before ``last``."""
        return Rows(**{name: getattr(self, name)[first:last] for name in COLUMNS})

    def take(self, index: NDArray[Any]) -> Rows:
        """Copies of the rows at ``index`` (integers, or a mask of length n)."""
        rows = np.flatnonzero(index) if index.dtype == bool else index
        return Rows(**{name: getattr(self, name).take(rows, axis=0) for name in COLUMNS})


_KINDS: Final = {
    name: get_args(get_args(kind)[1])[0] for name, kind in get_type_hints(Rows).items()
}
COLUMNS: Final = tuple(_KINDS)


def empty(n: int = 0) -> Rows:
    """``n`` rows of zeros."""
    wide = {"features": (n, NUM_FEATURES)}
    return Rows(**{name: np.zeros(wide.get(name, n), kind) for name, kind in _KINDS.items()})


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate ``parts``, at least one."""
    return Rows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS})


class Buffer:
    """A ring buffer of ``capacity`` rows; ``total`` counts all rows ever added. A row's number is
    ``total`` before it."""

    def __init__(self, capacity: int, held: Rows | None = None, total: int = 0) -> None:
        """``held``: the newest of ``total`` earlier rows."""
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
        """Store ``rows``, at most ``capacity``, over the oldest. Mutates."""
        slots = (self.total + np.arange(len(rows))) % self.capacity
        for name in COLUMNS:
            getattr(self._ring, name)[slots] = getattr(rows, name)
        self.total += len(rows)
        self._held = min(self._held + len(rows), self.capacity)

    def times(self, last: int) -> dict[str, float]:
        """``time_from`` and ``time_to`` of at most ``last`` newest rows, in seconds since the
        epoch."""
        first = self.total - min(len(self), last)
        held = self._ring.time[np.arange(first, self.total) % self.capacity]
        return {"time_from": float(held.min()), "time_to": float(held.max())} if len(held) else {}

    def recent(self, last: int) -> Rows:
        """Copies of at most ``last`` newest rows, oldest first."""
        held = min(len(self), last)
        begins, ends = (self.total - held) % self.capacity, self.total % self.capacity
        if held and ends <= begins:
            return joined([self._ring.part(begins, self.capacity), self._ring.part(0, ends)])
        return joined([self._ring.part(begins, ends)])

    def training(self) -> NDArray[np.int64]:
        """Numbers of trainable rows, oldest first; of all rows if none is trainable."""
        numbers = np.arange(self.total - len(self), self.total)
        trainable = self._ring.session[numbers % self.capacity] % np.uint64(HELD_OUT) != 0
        return numbers[trainable] if trainable.any() else numbers

    def at(self, numbers: NDArray[np.int64]) -> Rows:
        """Copies of the rows with these ``numbers``, which must be in the buffer."""
        return self._ring.take(numbers % self.capacity)


HELD_OUT: Final = 4  # one session in so many, by its hash, is held out for evaluation


def is_held_out(session: int) -> bool:
    """Whether the session of this hash is held out from training."""
    return session % HELD_OUT == 0


def hash_id(text: str) -> int:
    """A 64-bit hash of an id, equal on all machines."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def from_batch(batch: EventBatch) -> Rows:
    """The trainable events of ``batch``, in order."""
    indices = np.flatnonzero(training_mask(batch))

    def names(column: str) -> list[str]:
        return [batch.names[column][index] for index in indices.tolist()]

    requests = names("request")
    sessions = [s or r for s, r in zip(names("session"), requests, strict=True)]
    hashes = {name: hash_id(name) for name in {*requests, *sessions}}
    numbers = {name: column[indices] for name, column in batch.numbers.items() if name in _READ}
    is_rate = np.array([name == "rate" for name in names("parameter_name")], bool)
    model = numbers["model_accepted"]
    columns = {
        **numbers,
        "features": batch.features[indices],
        "request": [hashes[name] for name in requests],
        "session": [hashes[name] for name in sessions],
        "rate": np.where(is_rate, numbers["parameter"], np.nan),
        "model_expected": numbers["predicted_model"],
        "model_accepted": np.where(model < 0, np.nan, model),
        "censored": [bool(reason) for reason in names("censored")],
        "arm": [_ARM.get(name, UNKNOWN) for name in names("arm")],
    }
    return Rows(**{name: np.asarray(columns[name], kind) for name, kind in _KINDS.items()})


def training_mask(batch: EventBatch) -> NDArray[np.bool_]:
    """Mask [n] of trainable events: those with a cache draft within the worker's own limits."""
    own = np.array([variant in OWN_DRAFTS for variant in batch.names["side"]], bool)
    mask: NDArray[np.bool_] = (batch.numbers["draft_len"] > 0) & own
    return mask


_READ: Final = {*COLUMNS, "parameter", "predicted_model"}
_ARM: Final = {name: index for index, name in enumerate(ARMS)}
