"""What outlives the process beside the scopes: how far was read, what was counted, what waits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

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
        written += checkpoint.save(settings.checkpoint_path, *_told_of(state, settings.topic.name))
    except OSError:
        state.scopes.sweep(saved=False)
        raise
    state.scopes.sweep()
    return written


def _told_of(state: State, topic: str) -> tuple[checkpoint.Arrays, dict[str, Any]]:
    arrays: checkpoint.Arrays = {
        f"waiting.{index}": np.frombuffer(to_bytes(each.policy), np.uint8)
        for index, each in enumerate(state.waiting)
    }
    rollouts = {}
    for scope, rollout in state.rollouts.items():
        held, rollouts[scope] = rollout.snapshot()
        arrays |= checkpoint.under(f"rollout.{scope}.", held)
    files = _Files(state.scopes.serial, state.scopes.lost, list(state.scopes.entries.items()))
    return arrays, {
        **_NUMBERS.dump_python(replace(state, topic=topic), mode="json"),
        **_FILES.dump_python(files, mode="json"),
        "waiting": [_told(each) for each in state.waiting],
        "rollouts": rollouts,
    }


def resumed(settings: LearnerSettings) -> State:
    """What the newest sound checkpoint says; an empty state where there is none."""
    fresh = State(Scopes(settings))
    loaded = checkpoint.load(settings.checkpoint_path)
    if loaded is None:
        log.info("no checkpoint at %s: starting anew", settings.checkpoint_path)
        return fresh
    arrays, told = loaded
    try:
        numbers, files = _NUMBERS.validate_python(told), _FILES.validate_python(told)
        if numbers.topic != settings.topic.name:
            log.warning("the checkpoint is of another topic than %s: anew", settings.topic.name)
            return fresh
        return State(
            Scopes(settings, files.scopes, files.serial, files.lost),
            _waiting(arrays, told["waiting"]),
            _rollouts(arrays, told["rollouts"]),
            **vars(numbers),
        )
    except _UNREADABLE as error:
        log.error("checkpoint is not of this version (%s): starting anew", error)
        return fresh


def _waiting(arrays: checkpoint.Arrays, told: list[dict[str, Any]]) -> list[Registration]:
    """Those that can be read: one that cannot must not cost the others, and all the scopes."""
    found = []
    for index, each in enumerate(told):
        try:
            found.append(Registration(from_bytes(arrays[f"waiting.{index}"].tobytes()), **each))
        except _UNREADABLE as error:
            log.error("a registration that waited is dropped: %s", error)
    return found


def _rollouts(arrays: checkpoint.Arrays, told: Mapping[str, Any]) -> dict[str, Rollout]:
    """Those that can be read: the trial that is lost with one is begun again."""
    found = {}
    for scope, each in told.items():
        held = checkpoint.within(f"rollout.{scope}.", arrays)
        try:
            found[scope] = Rollout.restored((held, each))
        except _UNREADABLE as error:
            log.error("scope %s: what was compared is not of this version (%r)", scope, error)
    return found


def _told(registration: Registration) -> dict[str, Any]:
    return {name: value for name, value in vars(registration).items() if name != "policy"}


_UNREADABLE: Final[tuple[type[Exception], ...]] = (
    KeyError, IndexError, ValueError, TypeError, AttributeError, ContractError,
)  # fmt: skip
