"""What outlives the process beside the scopes: how far was read, what was counted, what waits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from decoder.contracts.errors import ContractError
from decoder.contracts.topics import LESSONS
from decoder.policy.probes import from_bytes, to_bytes
from learner import checkpoint
from learner.registrations import Registration
from learner.rollout import Rollout
from learner.scopes import Entry, Scopes
from learner.sequences import Lately, Sequences, runs_of
from learner.settings import LearnerSettings
from learner.source import Mark

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. The numbers are those of ``EventSource``, ``Intake`` and
    ``Published``, and of the rounds' source."""

    scopes: Scopes
    offsets: Mapping[int, int] = field(default_factory=dict)
    skipped: int = 0
    sequences: Sequences = field(default_factory=Sequences)
    refused: Mapping[str, int] = field(default_factory=dict)
    repeated: int = 0
    faults: int = 0
    waiting: Sequence[Registration] = ()
    published: Mapping[bytes, int] = field(default_factory=dict)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    round_offsets: Mapping[int, int] = field(default_factory=dict)
    round_sequences: Sequences = field(default_factory=Sequences)
    marks: Mapping[int, Mark] = field(default_factory=dict)
    round_marks: Mapping[int, Mark] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


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
    numbers = {
        "topic": topic,
        "offsets": {str(p): offset for p, offset in state.offsets.items()},
        "skipped": state.skipped,
        "sequences": state.sequences.known(),
        "missing": state.sequences.missing,
        "duplicates": state.sequences.duplicates,
        "refused": dict(state.refused),
        "repeated": state.repeated,
        "faults": state.faults,
        "waiting": [_told(each) for each in state.waiting],
        "published": {key.decode(): number for key, number in state.published.items()},
        "rollouts": rollouts,
        "round_offsets": {str(p): offset for p, offset in state.round_offsets.items()},
        "round_sequences": state.round_sequences.known(),
        "marks": list(state.marks.items()),
        "round_marks": list(state.round_marks.items()),
        "shares": dict(state.shares),
        "serial": state.scopes.serial,
        "lost": state.scopes.lost,
        # a list: JSON with sorted keys loses an order
        "scopes": [[name, asdict(entry)] for name, entry in state.scopes.entries.items()],
    }
    return arrays, numbers


def resumed(settings: LearnerSettings) -> State:
    """What the newest sound checkpoint says; an empty state where there is none."""
    known = Lately if settings.topic is LESSONS else Sequences
    fresh = State(Scopes(settings), sequences=known())
    loaded = checkpoint.load(settings.checkpoint_path)
    if loaded is None:
        log.info("no checkpoint at %s: starting anew", settings.checkpoint_path)
        return fresh
    arrays, numbers = loaded
    if numbers["topic"] != settings.topic.name:
        log.warning("the checkpoint is of another topic than %s: anew", settings.topic.name)
        return fresh
    try:
        entries = [(str(name), Entry.told(entry)) for name, entry in numbers["scopes"]]
        return State(
            Scopes(settings, entries, int(numbers["serial"]), _lost(numbers["lost"])),
            {int(p): int(offset) for p, offset in numbers["offsets"].items()},
            int(numbers["skipped"]),
            known(
                runs_of(numbers["sequences"]), int(numbers["missing"]), int(numbers["duplicates"])
            ),
            {str(reason): int(n) for reason, n in numbers["refused"].items()},
            int(numbers["repeated"]),
            int(numbers["faults"]),
            _waiting(arrays, numbers["waiting"]),
            {key.encode(): int(n) for key, n in numbers["published"].items()},
            _rollouts(arrays, numbers["rollouts"]),
            {int(p): int(offset) for p, offset in numbers["round_offsets"].items()},
            Sequences(runs_of(numbers["round_sequences"])),
            _marks(numbers["marks"]),
            _marks(numbers["round_marks"]),
            {str(scope): float(share) for scope, share in numbers["shares"].items()},
        )
    except _UNREADABLE as error:
        log.error("checkpoint is not of this version (%s): starting anew", error)
        return fresh


def _lost(told: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    return {
        str(scope): {str(reason): int(n) for reason, n in reasons.items()}
        for scope, reasons in told.items()
    }


def _marks(told: list[Any]) -> dict[int, Mark]:
    return {int(p): (int(offset), int(stamp), int(crc)) for p, (offset, stamp, crc) in told}


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
