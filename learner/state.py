"""What outlives the process beside the scopes: how far was read, what was counted, what waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
from pydantic import TypeAdapter

from decoder.contracts.errors import ContractError
from decoder.policy.probes import from_bytes, to_bytes
from learner import checkpoint
from learner.registrations import Registration
from learner.rollout import Rollout
from learner.scopes import Entry, Scopes
from learner.sequences import NOTHING, Known
from learner.settings import LearnerSettings
from learner.source import Mark

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a checkpoint says in JSON, beside scopes, registrations and rollouts: numbers of
    ``EventSource``, ``Sequences``, ``Intake`` and ``Published``, and of the rounds' source."""

    topic: str = ""
    offsets: Mapping[int, int] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)
    skipped: int = 0
    sequences: Known = NOTHING
    refused: Mapping[str, int] = field(default_factory=dict)
    repeated: int = 0
    faults: int = 0
    published: Mapping[bytes, int] = field(default_factory=dict)
    round_offsets: Mapping[int, int] = field(default_factory=dict)
    round_marks: Mapping[int, Mark] = field(default_factory=dict)
    round_sequences: Known = NOTHING
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class State(Numbers):
    """What a checkpoint holds."""

    scopes: Scopes
    waiting: Sequence[Registration] = ()
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)


@dataclass(frozen=True)
class _Files:
    serial: int
    lost: Mapping[str, Mapping[str, int]]
    scopes: Sequence[tuple[str, Entry]]  # JSON with sorted keys loses an order


_NUMBERS, _FILES = TypeAdapter(Numbers), TypeAdapter(_Files)


def save(settings: LearnerSettings, state: State) -> int:
    """Write what changed of the scopes, then the checkpoint that names their files; the bytes.

    Raises:
        OSError: the disk refuses; what was saved before is in force.
    """
    try:
        written = state.scopes.save()
        written += checkpoint.save(settings.checkpoint_path, _told_of(state, settings.topic.name))
    except OSError:
        state.scopes.sweep(saved=False)
        raise
    state.scopes.sweep()
    return written


def _told_of(state: State, topic: str) -> checkpoint.Tree:
    files = _Files(state.scopes.serial, state.scopes.lost, list(state.scopes.entries.items()))
    return {
        **_NUMBERS.dump_python(replace(state, topic=topic), mode="json"),
        **_FILES.dump_python(files, mode="json"),
        "waiting": {
            f"{index:06}": {**vars(each), "policy": np.frombuffer(to_bytes(each.policy), np.uint8)}
            for index, each in enumerate(state.waiting)
        },
        "rollouts": {scope: rollout.snapshot() for scope, rollout in state.rollouts.items()},
    }


def resumed(settings: LearnerSettings) -> State:
    """What the newest sound checkpoint says; an empty state where there is none."""
    fresh = State(Scopes(settings))
    told = checkpoint.load(settings.checkpoint_path)
    if told is None:
        log.info("no checkpoint at %s: starting anew", settings.checkpoint_path)
        return fresh
    try:
        numbers, files = _NUMBERS.validate_python(told), _FILES.validate_python(told)
        if numbers.topic != settings.topic.name:
            log.warning("the checkpoint is of another topic than %s: anew", settings.topic.name)
            return fresh
        return State(
            Scopes(settings, files.scopes, files.serial, files.lost),
            list(_readable(_registration, told["waiting"], "registration").values()),
            _readable(Rollout.restored, told["rollouts"], "comparison of scope"),
            **vars(numbers),
        )
    except _UNREADABLE as error:
        log.error("checkpoint is not of this version (%s): starting anew", error)
        return fresh


def _readable(read: Callable[[Any], T], told: Mapping[str, Any], what: str) -> dict[str, T]:
    """Those that can be read: one that cannot must not cost the others, and all the scopes."""
    found = {}
    for name, each in told.items():
        try:
            found[name] = read(each)
        except _UNREADABLE as error:
            log.error("%s %s is dropped, for it cannot be read: %r", what, name, error)
    return found


def _registration(told: Mapping[str, Any]) -> Registration:
    return Registration(**{**told, "policy": from_bytes(told["policy"].tobytes())})


_UNREADABLE: Final[tuple[type[Exception], ...]] = (
    KeyError, IndexError, ValueError, TypeError, AttributeError, ContractError,
)  # fmt: skip
