"""What outlives the process beside the scopes: how far was read, what was counted, what waits."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

from safetensors import SafetensorError

from decoder.contracts.errors import SettingsError
from learner.checkpoint import FORMAT, Damaged, OtherFormat, Store, Tree, made
from learner.ingest.sequences import Sequences
from learner.ingest.source import Mark
from learner.release.registrations import Registration
from learner.release.rollout import Event, Rollout
from learner.scopes import Scopes
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
    """What is saved."""

    scopes: Scopes


def save(settings: LearnerSettings, state: State) -> int:
    """Store what changed of the scopes, and all else, in one transaction; the bytes.

    Raises:
        OSError: the disk refuses; what was saved before is in force.
    """
    scopes = state.scopes
    tree = {
        **{name: value for name, value in vars(state).items() if name != "scopes"},
        "topic": settings.topic.name,
        "published": {key.decode(): number for key, number in state.published.items()},
        "entries": scopes.entries,
        "lost": scopes.lost,
    }
    try:
        written = scopes.save() + scopes.store.put("state", tree)
        scopes.commit()
    except OSError:
        scopes.undo()
        raise
    return written


def resumed(settings: LearnerSettings) -> State:
    """What was saved last; an empty state where nothing was, or nothing that can be continued.

    Raises:
        SettingsError: the store cannot be opened.
    """
    path, older = settings.store_path, settings.state_dir / "checkpoint.safetensors"
    store = None
    try:
        if older.exists():
            raise OtherFormat("files")  # of a release that had one for each scope
        store = Store(path)
        for tree in store.get("state"):
            return _read(settings, store, tree)
        log.info("nothing is saved in %s: starting anew", path)
        return State(Scopes(settings, store=store))
    except OtherFormat as error:
        of, why = str(error), f"is of {error}, and not of {FORMAT} and {settings.topic.name}"
    except (Damaged, SafetensorError, ValueError, KeyError, TypeError) as error:
        of, why = "damaged", f"cannot be read ({error})"
    except OSError as error:
        raise SettingsError(f"{path} cannot be used ({error}): see to its disk.") from error
    if store is not None:
        store.close()
    previous = older.with_suffix(".safetensors.previous")
    _set_aside(path, [*path.parent.glob(f"{path.name}*"), path.parent / "scopes", previous, older],
               of, why)  # fmt: skip
    return State(Scopes(settings))


def _read(settings: LearnerSettings, store: Store, tree: Tree) -> State:
    if tree["topic"] != settings.topic.name:
        raise OtherFormat(tree["topic"])
    waiting = _sound(Registration, dict(enumerate(tree["waiting"])), "registration")
    rollouts = _sound(Rollout, tree["rollouts"], "comparison of scope")
    for rollout in rollouts.values():
        if rollout.one is not None:
            rollout.step(Event.RESUMED)
    scopes = Scopes(settings, tree.pop("entries"), tree.pop("lost"), store)
    kept = made(Kept, tree | {"waiting": list(waiting.values()), "rollouts": rollouts})
    return State(scopes, **vars(kept))


def _set_aside(path: Path, files: Sequence[Path], of: str, why: str) -> None:
    """Keep ``files``, which cannot be continued, for who goes back to what wrote them. After a kill
    it is done again: of the release before, the file that says what it is goes last."""
    folder, existing = path.parent, [each for each in files if each.exists()]
    names = (f"older-{of}" + f".{n}" * bool(n) for n in count())
    free = (
        d for d in map(folder.joinpath, names) if not any((d / e.name).exists() for e in existing)
    )
    aside = next(free)
    log.error(
        "the state %s: it is built anew from champion, MLflow and lessons. The files are kept in "
        "%s; to go back to what wrote them, stop this learner, remove %s*, and move the kept ones "
        "to their place", why, aside, path,
    )  # fmt: skip
    try:
        aside.mkdir(exist_ok=True)
        for each in existing:
            each.replace(aside / each.name)
    except OSError as error:
        raise SettingsError(f"{path}* cannot be set aside ({error}): move it away.") from error
    kept = [each for each in folder.glob("older-*") if each != aside and each.is_dir()]
    for older in sorted(kept, key=lambda each: each.stat().st_mtime)[: 1 - KEPT]:
        log.warning("%s is removed: %d that are newer are kept", older, KEPT)
        shutil.rmtree(older, ignore_errors=True)


def _sound(kind: type[T], trees: Mapping[Any, Any], what: str) -> dict[Any, T]:
    """Those that can be read: one that cannot must not cost the others, and all the scopes."""
    sound = {}
    for name, each in trees.items():
        try:
            sound[name] = made(kind, each)
        except ValueError as error:
            log.error("%s %s is dropped, for it cannot be read: %s", what, name, error)
    return sound
