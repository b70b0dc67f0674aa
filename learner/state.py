"""State that outlives the process beside the scopes: offsets, counters, pending registrations."""

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
from learner.checkpoint import FORMAT, Damaged, OtherFormat, Store, Tree, restore
from learner.ingest.sequences import Sequences
from learner.ingest.source import Fingerprint
from learner.release.registrations import Registration
from learner.release.rollout import Event, Rollout
from learner.scopes import Scopes
from learner.settings import LearnerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FOLDERS: Final = 3  # folders of files set aside


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """Of ``EventSource``, ``RecordReader``, ``PolicyTopic``, ``Registrar`` and ``Rollouts``."""

    topic: str = ""
    offsets: Mapping[int, int] = field(default_factory=dict)
    marks: Mapping[int, Fingerprint] = field(default_factory=dict)
    skipped: int = 0
    sequences: Sequences = field(default_factory=Sequences)
    refused: Mapping[str, int] = field(default_factory=dict)
    repeated: int = 0
    faults: int = 0
    published: Mapping[bytes, int] = field(default_factory=dict)
    round_offsets: Mapping[int, int] = field(default_factory=dict)
    round_marks: Mapping[int, Fingerprint] = field(default_factory=dict)
    round_sequences: Sequences = field(default_factory=Sequences)
    shares: Mapping[str, float] = field(default_factory=dict)
    waiting: Sequence[Registration] = ()
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)


@dataclass(frozen=True)
class State(StoredState):
    """All state."""

    scopes: Scopes


def save(settings: LearnerSettings, state: State) -> int:
    """Store changed scopes and all other state in one transaction; the bytes written.

    Raises:
        OSError: the disk refuses; the last saved state is unchanged.
    """
    scopes = state.scopes
    tree = {
        **{name: value for name, value in vars(state).items() if name != "scopes"},
        "topic": settings.topic.name,
        "published": {key.decode(): number for key, number in state.published.items()},
        "entries": scopes.events,
        "lost": scopes.lost,
    }
    try:
        written = scopes.save() + scopes.store.put("state", tree)
        scopes.commit()
    except OSError:
        scopes.rollback()
        raise
    return written


def load(settings: LearnerSettings) -> State:
    """The state saved last; an empty one if there is none, or none that can be continued.

    Raises:
        SettingsError: the store cannot be opened.
    """
    path, older = settings.store_path, settings.state_dir / "checkpoint.safetensors"
    store = None
    try:
        if older.exists():
            raise OtherFormat("files")  # of a release with a file for each scope
        store = Store(path)
        for tree in store.get("state"):
            return _restore(settings, store, tree)
        log.info("%s holds no state: starting anew", path)
        return State(Scopes(settings, store=store))
    except OtherFormat as error:
        label = str(error)
        why = f"has format {error}, not {FORMAT} of {settings.topic.name}"
    except (Damaged, SafetensorError, ValueError, KeyError, TypeError) as error:
        label, why = "damaged", f"is unreadable ({error})"
    except OSError as error:
        raise SettingsError(f"{path} is unusable ({error}): check its disk.") from error
    if store is not None:
        store.close()
    previous = older.with_suffix(".safetensors.previous")
    files = [*path.parent.glob(f"{path.name}*"), path.parent / "scopes", previous, older]
    _set_aside(path, [each for each in files if each.exists()], label, why)
    return State(Scopes(settings))


def _restore(settings: LearnerSettings, store: Store, tree: Tree) -> State:
    if tree["topic"] != settings.topic.name:
        raise OtherFormat(tree["topic"])
    waiting = _restore_valid(Registration, dict(enumerate(tree["waiting"])), "registration")
    rollouts = _restore_valid(Rollout, tree["rollouts"], "comparison of scope")
    for rollout in rollouts.values():
        if rollout.comparison is not None:
            rollout.step(Event.RESUMED)
    scopes = Scopes(settings, tree.pop("entries"), tree.pop("lost"), store)
    valid = tree | {"waiting": list(waiting.values()), "rollouts": rollouts}
    return State(scopes, **vars(restore(StoredState, valid)))


def _set_aside(path: Path, files: Sequence[Path], label: str, why: str) -> None:
    """Move ``files`` to a folder, for a return to the release that wrote them. Idempotent after a
    kill: the file that identifies an older release goes last."""
    folder = path.parent
    names = (f"older-{label}" + f".{n}" * bool(n) for n in count())
    folders = map(folder.joinpath, names)
    target = next(f for f in folders if not any((f / each.name).exists() for each in files))
    log.error(
        "the state %s: it is rebuilt from the champion, MLflow and new drafts. The files are kept "
        "in %s; to go back to what wrote them, stop this learner, remove %s*, and move them back",
        why, target, path,
    )  # fmt: skip
    try:
        target.mkdir(exist_ok=True)
        for each in files:
            each.replace(target / each.name)
    except OSError as error:
        raise SettingsError(f"{path}* cannot be set aside ({error}): move it away.") from error
    others = [each for each in folder.glob("older-*") if each != target and each.is_dir()]
    for oldest in sorted(others, key=lambda each: each.stat().st_mtime)[: 1 - MAX_FOLDERS]:
        log.warning("removing %s: the newest %d are kept", oldest, MAX_FOLDERS)
        shutil.rmtree(oldest, ignore_errors=True)


def _restore_valid(kind: type[T], trees: Mapping[Any, Any], what: str) -> dict[Any, T]:
    """Restore what is valid: an invalid entry must not cost the others, and all scopes."""
    valid = {}
    for name, each in trees.items():
        try:
            valid[name] = restore(kind, each)
        except ValueError as error:
            log.error("%s %s is unreadable and dropped: %s", what, name, error)
    return valid
