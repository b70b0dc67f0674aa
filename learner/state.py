"""What outlives the process beside the scopes: how far was read, what was counted, what waits."""

from __future__ import annotations

import logging
import shutil
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
        of = kept.topic
    except checkpoint.OtherFormat as error:
        of = str(error)
    except (ValueError, KeyError) as error:
        log.error("the checkpoint cannot be read: %s", error)
        of = "unreadable"
    _set_aside(settings, of)
    return State(Scopes(settings))


def _set_aside(settings: LearnerSettings, of: str) -> None:
    """Keep checkpoint and scopes, which are not to be gone on from, for who goes back to what wrote
    them: one such generation, and what was kept for this release. After a kill it is done again:
    the checkpoint goes last."""
    folder, path = settings.state_dir, settings.checkpoint_path
    aside, ours = folder / f"older-{of}", {checkpoint.FORMAT, settings.topic.name}
    log.error(
        "the checkpoint is of another version or topic (%s, not %s of %s): the state is built anew "
        "from champion, MLflow and lessons, and the old files are kept in %s; to go back to what "
        "wrote them, move them back first", of, checkpoint.FORMAT, settings.topic.name, aside,
    )  # fmt: skip
    scopes = folder / "scopes"
    try:
        for older in folder.glob("older-*"):
            if older.name.removeprefix("older-") not in ours and (
                older != aside or scopes.exists()
            ):
                shutil.rmtree(older)
        aside.mkdir(exist_ok=True)
        for each in (scopes, checkpoint.previous_of(path), path):
            if each.exists():
                each.replace(aside / each.name)
    except OSError as error:
        log.error("the old files cannot be kept: %s", error)


def _sound(kind: type[T], told: Mapping[Any, Any], what: str) -> dict[Any, T]:
    """Those that can be read: one that cannot must not cost the others, and all the scopes."""
    found = {}
    for name, each in told.items():
        try:
            found[name] = checkpoint.made(kind, each)
        except ValueError as error:
            log.error("%s %s is dropped, for it cannot be read: %s", what, name, error)
    return found
