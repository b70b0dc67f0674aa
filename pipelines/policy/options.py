"""Which registry, model and version a person means."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from decoder.contracts.errors import RegistryError
from learner.registry import Registry, Standing, Version
from learner.settings import LearnerSettings


@dataclass(frozen=True)
class Model:
    """A registered model: the policies of one scope, versions ascending."""

    registry: Registry
    standing: Standing
    versions: list[Version]

    @property
    def scope(self) -> str:
        """Of the model."""
        return self.standing.scope

    def version(self, wanted: str) -> Version:
        """The version of a number, or that an alias names.

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
    """The models of a scope, named by its first digits or the model's name; without one all.

    Raises:
        RegistryError: there is none of this scope, or no registry.
        SettingsError: a setting of the learner is wrong.
    """
    settings = LearnerSettings.load()
    uri = settings.mlflow_tracking_uri
    if uri.startswith("sqlite:///") and not Path(urlparse(uri).path[1:]).exists():
        raise RegistryError(
            f"no registry at {uri}: start one with 'hvd up' in this folder, or name it by "
            "HVD_LEARNER_MLFLOW_TRACKING_URI"
        )
    registry = Registry.of(settings)
    standings = registry.standings().values()
    found = [s for s in standings if scope is None or s.scope.startswith(scope) or s.name == scope]
    if scope is not None and not found:
        among = ", ".join(sorted(s.scope for s in standings)) or "none at all"
        raise RegistryError(f"no policy of scope {scope}: name one with --scope, of {among}")
    return [Model(registry, s, registry.versions(s.scope)) for s in found]


def one_model(scope: str | None) -> Model:
    """The only one of :func:`models`.

    Raises:
        RegistryError: none, or more than one.
    """
    found = models(scope)
    if not found:
        raise RegistryError("no policy is registered yet: a learner makes them")
    if len(found) > 1:
        among = ", ".join(sorted(model.scope for model in found))
        raise RegistryError(f"several policies: name one with --scope, of {among}")
    return found[0]


def person() -> str:
    """Who moves something, as the machine knows them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user: a container's
        return "somebody"
