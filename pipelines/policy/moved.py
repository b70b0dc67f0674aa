"""What a person may do to what is served; each move says who, when and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from decoder.contracts.errors import RegistryError
from learner.registry import Version
from learner.registry.moves import Move
from pipelines.policy.asked import Model, person, read

PASSED: Final = ("learner", "first")
"""Origins of versions that passed the gate, or that every scope begins with."""


def promote(model: Model, asked: str, why: str, *, force: bool) -> int:
    """Move alias ``champion`` to a version, or to a file, which is registered first.

    Returns:
        The version.

    Raises:
        RegistryError: it has not passed the gate, a pin goes before it, or its artefact is
            unusable; only the last cannot be forced.
    """
    scope, by = model.scope, person()
    pinned = model.standing.pinned
    if pinned is not None and not force:
        raise RegistryError(
            f"version {pinned} is pinned and would still be served: end that first with "
            "'hvd policy unpin', or give --force to move the champion behind it"
        )
    path = Path(asked)
    if path.is_file():
        if not force:
            raise RegistryError(f"{asked} has not passed the gate: give --force to promote it")
        tags = {
            "origin": "person",
            "made_by": by,
            **{key: model.standing.tags[key] for key in SERVED if key in model.standing.tags},
        }
        number = model.registry.register(read(path, scope), {"file": path.name}, tags=tags)
    else:
        version = model.version(asked)
        if not force and not _has_passed(version):
            raise RegistryError(
                f"version {version.number} has not passed the gate: give --force to promote it"
            )
        number = model.registry.load(scope, version.number).version
    model.registry.promote(scope, number, {"moved_by": by, "why": why or "promoted by hand"})
    return number


def rollback(model: Model, why: str) -> tuple[int, int]:
    """Move alias ``champion`` to the version that was champion before.

    Returns:
        The version that was champion, and the one that is.

    Raises:
        RegistryError: there is no champion, nothing before it, or that is gone.
    """
    champion = model.standing.champion
    if champion is None:
        raise RegistryError(f"{model.standing.name} has no champion to roll back")
    before = predecessor(model.registry.history(model.scope), champion)
    if before is None:
        raise RegistryError(
            f"nothing was champion before version {champion}: choose one with 'hvd policy promote'"
        )
    if before not in {version.number for version in model.versions}:
        raise RegistryError(
            f"version {before}, which was champion before, is retired: choose another with "
            "'hvd policy promote'"
        )
    reason = why or f"rollback of version {champion}"
    model.registry.load(model.scope, before)
    model.registry.promote(model.scope, before, {"moved_by": person(), "why": reason})
    return champion, before


def predecessor(history: Sequence[Move], champion: int) -> int | None:
    """What was champion before ``champion``, a move back taken for an undone one: rolling back
    twice goes back twice."""
    stack: list[int] = []
    for move in history:
        if move.alias != "champion" or move.after is None:
            continue
        if not stack and move.before is not None:
            stack.append(move.before)
        if len(stack) > 1 and move.after == stack[-2]:
            stack.pop()
        elif not stack or move.after != stack[-1]:
            stack.append(move.after)
    if stack and stack[-1] != champion:  # moved without us, as on MLflow's page
        stack.append(champion)
    return stack[-2] if len(stack) > 1 else None


def name(model: Model, alias: str, asked: str | None, why: str) -> int | None:
    """Let alias ``pinned`` or ``trial`` name a version, or nothing.

    Returns:
        The version.

    Raises:
        RegistryError: there is no such version, its artefact is unusable, nothing to end, or a pin
            goes before the trial.
    """
    pinned, number = model.standing.pinned, None
    if alias == "trial" and asked is not None and pinned is not None:
        raise RegistryError(
            f"version {pinned} is pinned, so nothing would be compared with it: end that first "
            "with 'hvd policy unpin'"
        )
    if asked is None:
        if alias not in {alias for version in model.versions for alias in version.aliases}:
            raise RegistryError(f"no version of {model.standing.name} has alias {alias}")
    else:
        version = model.version(asked)
        number = model.registry.load(model.scope, version.number).version
    model.registry.move(model.scope, alias, number, person(), why)
    return number


def _has_passed(version: Version) -> bool:
    return version.tags.get("origin") in PASSED or "moved_at" in version.tags


SERVED: Final = ("target", "drafter")
