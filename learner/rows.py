"""Labelled drafts in columns: what the buffer holds and every step of learning reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import DraftEvent, EventBatch
from decoder.contracts.features import NUM_FEATURES
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
        return Rows(**{name: getattr(self, name)[index] for name in COLUMNS})


COLUMNS: Final = tuple(f.name for f in fields(Rows))


def empty(n: int = 0) -> Rows:
    """``n`` rows of zeros: the storage of a buffer."""
    return Rows(
        request=np.zeros(n, np.uint64),
        session=np.zeros(n, np.uint64),
        time=np.zeros(n, np.float64),
        rate=np.full(n, np.nan, np.float32),
        features=np.zeros((n, NUM_FEATURES), np.float32),
        accepted=np.zeros(n, np.float32),
        censored=np.zeros(n, np.bool_),
        arm=np.zeros(n, np.int8),
        draft_len=np.zeros(n, np.int32),
        verified_len=np.zeros(n, np.int32),
        model_expected=np.zeros(n, np.float32),
        model_accepted=np.zeros(n, np.float32),
        batch_size=np.ones(n, np.int32),
        step_tokens=np.zeros(n, np.int32),
        step_us=np.zeros(n, np.float64),
    )


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all ``parts``, at least one, in their order."""
    return Rows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS})


def hash_id(text: str) -> int:
    """A 64-bit hash of an id that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def from_events(events: Sequence[DraftEvent]) -> Rows:
    """The columns of those ``events`` that have a cache draft, in their order."""
    events = [event for event in events if event.features is not None]
    if not events:
        return empty()
    missing = float("nan")
    names = {name: hash_id(name) for e in events for name in (e.request, e.session)}
    return Rows(
        request=np.array([names[e.request] for e in events], np.uint64),
        session=np.array([names[e.session or e.request] for e in events], np.uint64),
        time=np.array([e.time for e in events], np.float64),
        rate=np.array(
            [e.parameter if e.parameter_name == "rate" else missing for e in events], np.float32
        ),
        features=np.stack([e.features for e in events if e.features is not None]).astype(
            np.float32, copy=False
        ),
        accepted=np.array([e.accepted for e in events], np.float32),
        censored=np.array([bool(e.censored) for e in events], np.bool_),
        arm=np.array([_ARM.get(e.arm, UNKNOWN) for e in events], np.int8),
        draft_len=np.array([e.draft_len for e in events], np.int32),
        verified_len=np.array([e.verified_len for e in events], np.int32),
        model_expected=np.array([e.predicted_model for e in events], np.float32),
        model_accepted=np.array(
            [missing if e.model_accepted is None else e.model_accepted for e in events], np.float32
        ),
        batch_size=np.array([max(e.batch_size, 1) for e in events], np.int32),
        step_tokens=np.array([e.step_tokens for e in events], np.int32),
        step_us=np.array([e.step_us for e in events], np.float64),
    )


def from_batch(batch: EventBatch) -> Rows:
    """What :func:`from_events` makes of the batch's events, column by column."""
    numbers, names = batch.numbers, batch.names
    drafts = numbers["draft_len"] > 0
    sessions = [s or r for s, r in zip(names["session"], names["request"], strict=True)]
    hashes = {name: hash_id(name) for name in {*names["request"], *sessions}}
    is_rate = np.array([name == "rate" for name in names["parameter_name"]])
    columns: dict[str, NDArray[Any]] = {
        **numbers,
        "request": np.array([hashes[name] for name in names["request"]], np.uint64),
        "session": np.array([hashes[name] for name in sessions], np.uint64),
        "rate": np.where(is_rate, numbers["parameter"], np.nan),
        "features": batch.features,
        "model_expected": numbers["predicted_model"],
        "censored": np.array([bool(reason) for reason in names["censored"]]),
        "arm": np.array([_ARM.get(name, UNKNOWN) for name in names["arm"]], np.int8),
    }
    dtypes = {name: getattr(_NONE, name).dtype for name in COLUMNS}
    return Rows(**{n: columns[n][drafts].astype(dtypes[n], copy=False) for n in COLUMNS})


_NONE: Final = empty()
_ARM: Final = {name: index for index, name in enumerate(ARMS)}
