"""What outlives the process beside the scopes: how far was read, what was counted, what waits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from learner import checkpoint
from learner.registrations import Registration
from learner.rollout import Rollout
from learner.scopes import Files, Scopes
from learner.sequences import Sequences
from learner.settings import LearnerSettings
from learner.source import Mark

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Of ``EventSource``, ``Sequences``, ``Intake``, ``Published``, ``Registrar`` and ``Rollouts``,
    and of the rounds' source."""

    topic: str = ""
    offsets: Mapping[int, int] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)
    skipped: int = 0
    sequences: Sequences = field(default_factory=Sequences)
    refused: Mapping[str, int] = field(default_factory=dict)
    repeated: int = 0
    faults: int = 0
    published: Mapping[bytes, int] = field(default_factory=dict)
    round_offsets: Mapping[int, int] = field(default_factory=dict)
    round_marks: Mapping[int, Mark] = field(default_factory=dict)
    round_sequences: Sequences = field(default_factory=Sequences)
    shares: Mapping[str, float] = field(default_factory=dict)
    waiting: Sequence[Registration] = ()
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)


@dataclass(frozen=True)
class State(Kept):
    """What a checkpoint holds."""

    scopes: Scopes


def save(settings: LearnerSettings, state: State) -> int:
    """Write what changed of the scopes, then the checkpoint that names their files; the bytes.

    Raises:
        OSError: the disk refuses; what was saved before is in force.
    """
    try:
        written = state.scopes.save()
        told = {
            **vars(state),
            "topic": settings.topic.name,
            "published": {key.decode(): number for key, number in state.published.items()},
            "scopes": state.scopes.files,
        }
        written += checkpoint.save(settings.checkpoint_path, told)
    except OSError:
        state.scopes.sweep(saved=False)
        raise
    state.scopes.sweep()
    return written


def resumed(settings: LearnerSettings) -> State:
    """What the newest sound checkpoint says; an empty state where there is none."""
    fresh = State(Scopes(settings))
    told = checkpoint.load(settings.checkpoint_path)
    if told is None:
        log.info("no checkpoint at %s: starting anew", settings.checkpoint_path)
        return fresh
    try:
        waiting = _sound(Registration, dict(enumerate(told["waiting"])), "registration")
        rollouts = _sound(Rollout, told["rollouts"], "comparison of scope")
        for rollout in rollouts.values():
            rollout.outcome = None  # decided anew: another learner may have been at it since
        told |= {"waiting": list(waiting.values()), "rollouts": rollouts}
        kept, files = checkpoint.made(Kept, told), checkpoint.made(Files, told["scopes"])
    except (ValueError, KeyError) as error:
        log.error("checkpoint is not of this version (%s): starting anew", error)
        return fresh
    if kept.topic != settings.topic.name:
        log.warning("the checkpoint is of another topic than %s: anew", settings.topic.name)
        return fresh
    return State(Scopes(settings, files), **vars(kept))


def _sound(kind: type[T], told: Mapping[Any, Any], what: str) -> dict[Any, T]:
    """Those that can be read: one that cannot must not cost the others, and all the scopes."""
    found = {}
    for name, each in told.items():
        try:
            found[name] = checkpoint.made(kind, each)
        except ValueError as error:
            log.error("%s %s is dropped, for it cannot be read: %s", what, name, error)
    return found
