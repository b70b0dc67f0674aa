"""Aliases and versions as the registry reports them, and the digest of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import ROLES, Policy, metadata_of, pack

SCOPE_TAG: Final = "scope"
LOGGED_TAG: Final = "model_id"
"""Id of a version's logged model, which MLflow's own stores do not keep."""


@dataclass(frozen=True)
class AliasState:
    """Versions named by the aliases of a scope.

    ``champion`` and ``pinned`` decide what is served; ``trial`` is compared with it. ``name`` and
    ``tags`` are the registered model's.
    """

    scope: str
    champion: int | None = None
    pinned: int | None = None
    trial: int | None = None
    name: str = field(default="", compare=False)
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def served(self) -> int | None:
        """The version to serve."""
        return self.champion if self.pinned is None else self.pinned


@dataclass(frozen=True)
class Version:
    """A model version; ``created`` is in seconds since the epoch."""

    number: int
    created: float
    tags: Mapping[str, str]
    aliases: tuple[str, ...]
    description: str
    run: str
    source: str


def digest_of(policy: Policy) -> str:
    """Digest of a policy, regardless of version, publication and role."""
    plain = replace(policy, version=0, publication=0, role=ROLES[0], share=0.0)
    bundle = pack(plain, np.zeros(len(plain.probe_inputs), np.float32))
    return metadata_of(bundle)["digest"]


def alias_state_of(model: Any, prefix: str) -> AliasState:
    """Aliases of MLflow's registered ``model``, whose name starts with ``prefix``."""
    named = {alias: int(version) for alias, version in model.aliases.items()}
    return AliasState(
        scope=model.tags.get(SCOPE_TAG) or model.name.removeprefix(prefix),
        champion=named.get("champion"),
        pinned=named.get("pinned"),
        trial=named.get("trial"),
        name=model.name,
        tags=dict(model.tags),
    )


def version_of(record: Any, aliases: Mapping[str, Any]) -> Version:
    """MLflow's model version ``record``, of a model with ``aliases``."""
    number = int(record.version)
    return Version(
        number=number,
        created=record.creation_timestamp / 1e3,
        tags=dict(record.tags),
        aliases=tuple(sorted(a for a, v in aliases.items() if int(v) == number)),
        description=record.description or "",
        run=record.run_id or "",
        source=record.source,
    )
