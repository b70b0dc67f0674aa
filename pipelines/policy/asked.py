"""Which registry, scope and version a person means."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlparse

from decoder.contracts.bundle import CHAMPION, Policy
from decoder.contracts.errors import RegistryError
from decoder.policy.probes import from_bytes
from learner.registry import Registry, Standing, Version
from learner.settings import LearnerSettings

VARIABLE: Final = "HVD_LEARNER_MLFLOW_TRACKING_URI"


def registry() -> Registry:
    """The learner's registry, by its settings.

    Raises:
        RegistryError: it is a file that is not there.
        SettingsError: a setting of the learner is wrong.
    """
    settings = LearnerSettings.load()
    uri = settings.mlflow_tracking_uri
    if uri.startswith("sqlite:///") and not Path(urlparse(uri).path[1:]).exists():
        raise RegistryError(
            f"no registry at {uri}: start one with 'hvd up' in this folder, or name it by "
            f"{VARIABLE}"
        )
    return Registry(uri, settings.registry_prefix)


@dataclass(frozen=True)
class Model:
    """A scope in the registry, and all its versions, ascending."""

    registry: Registry
    standing: Standing
    versions: list[Version]

    @property
    def scope(self) -> str:
        """Of the model."""
        return self.standing.scope

    def version(self, asked: str) -> Version:
        """The version of a number, or that an alias names.

        Raises:
            RegistryError: there is none.
        """
        for version in self.versions:
            if asked in (str(version.number), *version.aliases):
                return version
        known = ", ".join([str(v.number) for v in self.versions[-8:]]) or "none at all"
        raise RegistryError(
            f"{self.standing.name} has no version {asked}: the last ones are {known}"
        )


def model(scope: str | None) -> Model:
    """The model that ``scope`` means: by its scope, the scope's first digits, or its name; without
    one the only model there is.

    Raises:
        RegistryError: none, or more than one.
    """
    held = registry()
    standings = held.standings()
    found = [
        standing
        for standing in standings.values()
        if scope is None or standing.scope.startswith(scope) or standing.name == scope
    ]
    if len(found) == 1:
        return Model(held, found[0], held.versions(found[0].scope))
    if not standings:
        raise RegistryError(
            f"no policy is registered at {held.tracking_uri} yet: a learner makes them"
        )
    among = ", ".join(sorted(s.scope for s in found or standings.values()))
    what = "several policies" if found else f"no policy of scope {scope}"
    raise RegistryError(f"{what}: name one with --scope, of {among}")


def read(path: Path, scope: str) -> Policy:
    """The bundle in ``path`` as a champion of ``scope``.

    Raises:
        RegistryError: the file cannot be read.
        PolicyRefused: it is damaged, or of another scope or feature schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RegistryError(f"cannot read {path}: {error.strerror or error}") from error
    policy = from_bytes(data, scope)
    return replace(policy, scope=scope, role=CHAMPION, version=0, publication=0, share=0.0)


def person() -> str:
    """Who asks, as the machine knows them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user: a container's
        return "somebody"
