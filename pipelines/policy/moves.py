"""A person's changes to what is served. Each records who, when and why, and returns what ``--json``
prints."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from decoder.contracts.bundle import CHAMPION, Policy
from decoder.contracts.errors import ModelError, RegistryError
from decoder.policy.probes import from_bytes
from learner.release.registry import AliasState, Registry, Version
from learner.release.registry.connection import database_of
from learner.release.registry.moves import AliasMove
from learner.settings import LearnerSettings


@dataclass(frozen=True)
class Model:
    """A registered model: the policies of one scope, versions ascending."""

    registry: Registry
    standing: AliasState
    versions: list[Version]

    @property
    def scope(self) -> str:
        """The model's scope."""
        return self.standing.scope

    def version(self, wanted: str) -> Version:
        """The version with a number or an alias.

        Raises:
            RegistryError: there is none.
        """
        for version in self.versions:
            if wanted in (str(version.number), *version.aliases):
                return version
        known = ", ".join(str(v.number) for v in self.versions[-8:]) or "none at all"
        raise RegistryError(
            f"{self.standing.name} has no version {wanted}: the last ones are {known}"
        )


def models(scope: str | None) -> list[Model]:
    """All models, or those of a scope, named by its first digits or the model's name.

    Raises:
        RegistryError: there is no such scope, or no registry.
        SettingsError: a setting of the learner is wrong.
    """
    settings = LearnerSettings.load()
    uri = settings.mlflow_tracking_uri
    if (database := database_of(uri)) is not None and not database.exists():
        raise RegistryError(
            f"no registry at {uri}: start one with 'hvd up' in this folder, or name it by "
            "HVD_LEARNER_MLFLOW_TRACKING_URI"
        )
    registry = Registry.of(settings)
    standings = registry.alias_states().values()
    chosen = [s for s in standings if scope is None or s.scope.startswith(scope) or s.name == scope]
    if scope is not None and not chosen:
        among = ", ".join(sorted(s.scope for s in standings)) or "none at all"
        raise RegistryError(f"no policy of scope {scope}: name one with --scope, of {among}")
    return [Model(registry, s, registry.versions(s.scope)) for s in chosen]


def one_model(scope: str | None) -> Model:
    """The only one of :func:`models`.

    Raises:
        RegistryError: there is none, or more than one.
    """
    every = models(scope)
    if not every:
        raise RegistryError(NONE_YET)
    if len(every) > 1:
        among = ", ".join(sorted(model.scope for model in every))
        raise RegistryError(f"several policies: name one with --scope, of {among}")
    return every[0]


def load_policy(path: Path, scope: str | None = None) -> Policy:
    """Load the bundle in ``path``, and check that it is for ``scope``, if given.

    Raises:
        ModelError: the file cannot be read.
        PolicyRefused: it is damaged, or for other features or another scope.
    """
    try:
        return from_bytes(path.read_bytes(), scope)
    except OSError as error:
        raise ModelError(f"policy {path} cannot be read: {error.strerror or error}.") from error


def person() -> str:
    """The user's name, for the record."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "somebody"


NONE_YET: Final = (
    "no policy is registered yet: a learner registers a scope's first after a hundred drafts; "
    "send some requests"
)
PASSED: Final = ("learner", "first")
"""Origins of versions that passed the gate, or that every scope starts with."""
KEPT_TAGS: Final = ("target", "drafter")  # the model's tags that a version from a file inherits


def promote(model: Model, wanted: str, why: str, *, force: bool) -> dict[str, Any]:
    """Move alias ``champion`` to a version, or to a file, which is registered first.

    Raises:
        RegistryError: it has not passed the gate, a pin takes precedence, or its artefact is
            unusable; only the last cannot be forced.
        PolicyRefused: the file is damaged, or for another scope or feature schema.
    """
    pinned, path = model.standing.pinned, Path(wanted)
    if pinned is not None and not force:
        raise RegistryError(
            f"version {pinned} is pinned and would still be served: end that first with "
            "'hvd policy unpin', or give --force to move the champion alone"
        )
    version = None if path.is_file() else model.version(wanted)
    tags = version.tags if version else {}
    if not (force or tags.get("origin") in PASSED or "moved_at" in tags):
        what = f"version {version.number}" if version else wanted
        raise RegistryError(f"{what} has not passed the gate: give --force to promote it")
    number = version.number if version else _register(model, path)
    return _move(model, "champion", number, why or "promoted by hand")


def rollback(model: Model, why: str) -> dict[str, Any]:
    """Move alias ``champion`` to the previous champion.

    Raises:
        RegistryError: there is no champion, no previous one, or it was retired.
    """
    champion = model.standing.champion
    if champion is None:
        raise RegistryError(f"{model.standing.name} has no champion to roll back")
    before = predecessor(model.registry.history(model.scope), champion)
    if before not in {version.number for version in model.versions}:
        raise RegistryError(
            f"{f'version {before}, now retired,' if before else 'nothing'} was champion before "
            f"version {champion}: choose one with 'hvd policy promote'"
        )
    return _move(model, "champion", before, why or f"rollback of version {champion}")


def predecessor(history: Sequence[AliasMove], champion: int) -> int | None:
    """The champion before ``champion``. A move back undoes a move, so two rollbacks go back two
    versions."""
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
    if stack and stack[-1] != champion:  # moved elsewhere, for example on MLflow's page
        stack.append(champion)
    return stack[-2] if len(stack) > 1 else None


def pin(model: Model, wanted: str | None, why: str) -> dict[str, Any]:
    """Move alias ``pinned`` to a version, or remove it.

    Raises:
        RegistryError: there is no such version, its artefact is unusable, or nothing is pinned.
    """
    if wanted is None and not any("pinned" in version.aliases for version in model.versions):
        raise RegistryError(f"no version of {model.standing.name} has alias pinned")
    return _move(model, "pinned", model.version(wanted).number if wanted else None, why)


def _move(model: Model, alias: str, number: int | None, why: str) -> dict[str, Any]:
    registry, scope = model.registry, model.scope
    if number is not None:
        registry.load(scope, number)  # raises if no worker could read it
    registry.move(scope, alias, number, person(), why)
    ends = {"from": getattr(model.standing, alias), "to": number}
    record = {"name": model.standing.name, "scope": scope, "alias": alias, **ends}
    return record | {"served": registry.alias_state(scope).served}


def _register(model: Model, path: Path) -> int:
    policy = load_policy(path, model.scope)
    policy = replace(policy, scope=model.scope, role=CHAMPION, version=0, publication=0, share=0.0)
    tags = {"origin": "person", "made_by": person()}
    tags |= {key: model.standing.tags[key] for key in KEPT_TAGS if key in model.standing.tags}
    return model.registry.register(policy, {"file": path.name}, tags=tags)
