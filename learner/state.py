"""What outlives the process beside the scopes: how far was read, what was counted, what waits."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TypeVar

from learner import checkpoint
from learner.ingest.sequences import Sequences
from learner.ingest.source import Mark
from learner.release.registrations import Registration
from learner.release.rollout import Rollout
from learner.scopes import Files, Scopes
from learner.settings import LearnerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

KEPT: Final = 3
"""Folders of files that were set aside."""


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
    try:
        told = checkpoint.load(settings.checkpoint_path)
        if told is None:
            log.info("no checkpoint at %s: starting anew", settings.checkpoint_path)
            return State(Scopes(settings))
        waiting = _sound(Registration, dict(enumerate(told["waiting"])), "registration")
        rollouts = _sound(Rollout, told["rollouts"], "comparison of scope")
        for rollout in rollouts.values():
            rollout.outcome = None  # decided anew: another learner may have been at it since
        told |= {"waiting": list(waiting.values()), "rollouts": rollouts}
        kept, files = checkpoint.made(Kept, told), checkpoint.made(Files, told["scopes"])
        if kept.topic == settings.topic.name:
            return State(Scopes(settings, files), **vars(kept))
        of, why = kept.topic, f"is of another topic, {kept.topic} and not {settings.topic.name}"
    except checkpoint.OtherFormat as error:
        of, why = str(error), f"is of another version, {error} and not {checkpoint.FORMAT}"
    except (ValueError, KeyError) as error:
        of, why = "unreadable", f"cannot be read ({error})"
    _set_aside(settings, of, why)
    return State(Scopes(settings))


def _set_aside(settings: LearnerSettings, of: str, why: str) -> None:
    """Keep checkpoint and scopes, which are not to be gone on from, for who goes back to what wrote
    them. After a kill it is done again: the checkpoint goes last."""
    folder, path = settings.state_dir, settings.checkpoint_path
    held = [e for e in (folder / "scopes", checkpoint.previous_of(path), path) if e.exists()]
    names = (f"older-{of}" + f".{n}" * bool(n) for n in count())
    free = (d for d in map(folder.joinpath, names) if not any((d / e.name).exists() for e in held))
    aside = next(free)
    log.error(
        "the checkpoint %s: the state is built anew from champion, MLflow and lessons. The files "
        "are kept in %s; to go back to what wrote them, stop this learner, remove %s* and scopes, "
        "and move the kept ones to their place", why, aside, path.name,
    )  # fmt: skip
    try:
        aside.mkdir(exist_ok=True)
        for each in held:
            each.replace(aside / each.name)
    except OSError as error:
        log.error("the files cannot be kept: %s", error)
    kept = [each for each in folder.glob("older-*") if each != aside and each.is_dir()]
    for older in sorted(kept, key=lambda each: each.stat().st_mtime)[: 1 - KEPT]:
        log.warning("%s is removed: %d that are newer are kept", older, KEPT)
        shutil.rmtree(older, ignore_errors=True)


def _sound(kind: type[T], told: Mapping[Any, Any], what: str) -> dict[Any, T]:
    """Those that can be read: one that cannot must not cost the others, and all the scopes."""
    found = {}
    for name, each in told.items():
        try:
            found[name] = checkpoint.made(kind, each)
        except ValueError as error:
            log.error("%s %s is dropped, for it cannot be read: %s", what, name, error)
    return found
