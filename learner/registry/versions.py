"""Policies as versions of registered models, and the aliases that say what is served.

What is served is what alias ``pinned`` names, else ``champion``. The learner moves ``candidate``
and ``champion``, and ``trial`` while nobody else has set it; ``pinned`` is a person's word alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import PolicyRefused, RegistryError
from decoder.policy.probes import from_bytes, to_bytes
from learner.registry import moves, runs
from learner.registry.connection import Connection
from learner.registry.models import Models
from learner.registry.standing import (
    LOGGED_TAG,
    Standing,
    Version,
    digest_of,
    standing_of,
    version_of,
)
from learner.settings import LearnerSettings

MODEL_PREFIX: Final = "hvd-payoff-"
ARTIFACT: Final = runs.BUNDLE
DIGEST_TAG: Final = "digest"


class Registry:
    """Versions of policies at one MLflow tracking URI (``sqlite:///...`` or ``http://...``).

    Two deployments with prefixes of their own share a server. Every method raises
    :class:`RegistryError` when MLflow cannot be reached or refuses.
    """

    def __init__(
        self, tracking_uri: str, prefix: str = MODEL_PREFIX, registry_uri: str = ""
    ) -> None:
        """``registry_uri``: where models are registered, if not with the tracking server."""
        self.tracking_uri = tracking_uri
        self.prefix = prefix
        self._connection = Connection(tracking_uri, registry_uri)
        self._models = Models(self._connection, prefix)

    @classmethod
    def of(cls, settings: LearnerSettings) -> Registry:
        """The registry that ``settings`` name; what they hold of credentials is put into the
        environment, where alone mlflow looks for them."""
        for name in ("username", "password", "token"):
            if value := getattr(settings, f"mlflow_{name}"):
                os.environ[f"MLFLOW_TRACKING_{name.upper()}"] = value
        uris = settings.mlflow_tracking_uri, settings.mlflow_registry_uri
        return cls(uris[0], settings.registry_prefix, uris[1])

    def register(
        self,
        policy: Policy,
        params: Mapping[str, Any] = {},
        metrics: Mapping[str, float] = {},
        tags: Mapping[str, str] = {},
        window: Mapping[str, Any] = {},
    ) -> int:
        """Make ``policy`` a version, if it is none yet, and move ``candidate`` to it.

        It is logged in a run of its own, artefact first: a version exists only with its artefact,
        and after a kill at any instant the same call makes no second one. Twins are told by
        :func:`digest_of`.

        Args:
            tags: of run and version; ``target`` and ``drafter`` name the registered model, too.
            window: what the policy was trained on, as :mod:`learner.registry.runs` has it.

        Returns:
            The version; :meth:`load` stamps it into the policy, so that what a worker reports can
            be found here.

        Raises:
            PolicyRefused: nobody could read its bundle; nothing was made.
        """
        bundle = to_bytes(replace(policy, version=0, publication=0, share=0.0))
        from_bytes(bundle, policy.scope)
        with self._connection.reaching("register a version"):
            name, digest = self._models.ensured(policy.scope, tags), digest_of(policy)
            number = self._version_of(name, digest)
            if number is None:
                run = runs.start(self._connection, policy, params, metrics, tags, window)
                run_id = run.info.run_id
                try:
                    logged = runs.log_model(self._connection, run, policy, bundle, tags)
                except Exception:
                    with suppress(Exception):  # what went wrong first is what is told
                        self._client.set_terminated(run_id, "FAILED")
                    raise
                self._client.set_terminated(run_id)
                version = self._client.create_model_version(
                    name,
                    source=logged.artifact_location,
                    run_id=run_id,
                    tags={
                        **tags,
                        "kind": policy.kind,
                        DIGEST_TAG: digest,
                        LOGGED_TAG: logged.model_id,
                    },
                    description=runs.description(policy, params, tags, window),
                    model_id=logged.model_id,
                )
                number = int(version.version)
            self._client.set_registered_model_alias(name, "candidate", str(number))
            return number

    def promote(self, scope: str, version: int, why: Mapping[str, str] = {}) -> None:
        """Move alias ``champion`` of ``scope`` to ``version``.

        Args:
            why: ``moved_by`` and ``why``, as of :meth:`move`.
        """
        self.move(scope, "champion", version, why.get("moved_by", ""), why.get("why", ""))

    def move(self, scope: str, alias: str, version: int | None, by: str, why: str) -> None:
        """Let ``alias`` of ``scope`` name ``version``, or nothing, and keep who did so and why.

        A person's move, which goes over all: its tag comes first, so that a learner that moves the
        alias at the same moment finds it.
        """
        with self._model(
            scope, f"move {alias} to version {version}" if version else f"end {alias}"
        ) as name:
            was = moves.look(self._client, name, alias).named
            move = moves.Move(datetime.now(UTC), alias, was, version, by, why)
            key = self._keep(name, move)
            try:
                moves.write(self._client, name, alias, version)
            except Exception:
                self._client.delete_registered_model_tag(name, key)
                raise

    def move_over(
        self, scope: str, alias: str, over: int | None, to: int | None, by: str, why: str
    ) -> int | None:
        """As :meth:`move`, of a learner: from ``over`` to ``to``, unless somebody else moves it
        meanwhile. As :mod:`learner.registry.moves` does it.

        Returns:
            What the alias names then: ``to``, or what somebody else let it name.
        """
        with self._model(scope, f"move {alias} to version {to}" if to else f"end {alias}") as name:
            stands = moves.move_over(self._client, name, alias, over, to, by)
            if stands == to:
                self._keep(name, moves.Move(datetime.now(UTC), alias, over, to, by, why))
            return stands

    def _keep(self, name: str, move: moves.Move) -> str:
        """Add the tag of ``move`` to a model, and take the oldest away; its key. A champion says
        itself how it came to be that."""
        key, told = moves.tag_of(move)
        if move.alias == "champion" and move.after is not None:
            at = move.at.isoformat(timespec="seconds")
            for name_of, said in {"moved_at": at, "moved_by": move.by, "why": move.why}.items():
                self._client.set_model_version_tag(name, str(move.after), name_of, said)
        self._client.set_registered_model_tag(name, key, told)
        for spare in moves.spare(self._client.get_registered_model(name).tags):
            self._client.delete_registered_model_tag(name, spare)
        return key

    def history(self, scope: str) -> list[moves.Move]:
        """The moves of aliases that went through here, oldest first."""
        return moves.moves_in(self.standing(scope).tags)

    def tag(self, scope: str, version: int, tags: Mapping[str, str]) -> None:
        """Set ``tags`` of a version, over those of the same names."""
        with self._model(scope, f"tag version {version}") as name:
            for key, value in tags.items():
                self._client.set_model_version_tag(name, str(version), key, value)

    def find(self, policy: Policy) -> int | None:
        """The version of its scope that ``policy`` is, if it is one."""
        with self._model(policy.scope, "look for a version") as name:
            return self._version_of(name, digest_of(policy))

    def retire(self, scope: str, keep: int) -> list[int]:
        """Delete what ``scope`` has beyond ``keep`` versions, the oldest without an alias first.

        Those that never were champion go before those that were, and the champion before this one
        does not go at all. Their artefacts go, too; their runs stay.

        Returns:
            The versions that were deleted, ascending.
        """
        with self._model(scope, "retire versions") as name:
            held = {int(v.version): v for v in self._models.versions(name)}
            model = self._client.get_registered_model(name)
            named = {alias: int(version) for alias, version in model.aliases.items()}
            kept = {*named.values(), *moves.champions_before(model.tags, named.get("champion"))}
            served = moves.champions(model.tags)
            spare = max(len(held) - keep, 0)
            order = sorted(held, key=lambda version: (version in served, version))
            retired = sorted([version for version in order if version not in kept][:spare])
            for version in retired:
                # The version last: by it, what was cut off in between is found and done again.
                self._connection.files(held[version].source).delete_artifacts()
                if LOGGED_TAG in held[version].tags:
                    with self._connection.gone_or_not():
                        self._client.delete_logged_model(held[version].tags[LOGGED_TAG])
                self._client.delete_model_version(name, str(version))
            return retired

    def standing(self, scope: str) -> Standing:
        """Where the aliases of ``scope`` stand at this moment; it has been registered before."""
        with self._model(scope, "read aliases") as name:
            return standing_of(self._client.get_registered_model(name), self.prefix)

    def standings(self) -> dict[str, Standing]:
        """Every scope that has a registered model under this prefix."""
        found: dict[str, Standing] = {}
        with self._connection.reaching("list models"):
            for model in self._models.all():
                standing = standing_of(model, self.prefix)
                found.setdefault(standing.scope, standing)
        return found

    def versions(self, scope: str) -> list[Version]:
        """All versions of ``scope``, ascending."""
        with self._model(scope, "list versions") as name:
            aliases = self._client.get_registered_model(name).aliases
            held = [version_of(version, aliases) for version in self._models.versions(name)]
        return sorted(held, key=lambda version: version.number)

    def tags(self, scope: str, version: int) -> dict[str, str]:
        """Of a version."""
        with self._model(scope, f"read version {version}") as name:
            return dict(self._client.get_model_version(name, str(version)).tags)

    def digest(self, scope: str, version: int) -> str:
        """What the policy of a version is known by; "" of one that somebody else made."""
        return self.tags(scope, version).get(DIGEST_TAG, "")

    def load(self, scope: str, version: int) -> Policy:
        """The policy of a version, read from its artefact, checked, and stamped with the version.

        Raises:
            RegistryError: also when the artefact is missing, damaged, or not this version's.
        """
        purpose = f"read version {version}"
        with self._model(scope, purpose) as name, tempfile.TemporaryDirectory() as folder:
            held = self._client.get_model_version(name, str(version))
            path = self._connection.files(held.source).download_artifacts(ARTIFACT, folder)
            data = Path(path).read_bytes()
        try:
            policy = from_bytes(data, scope)
        except PolicyRefused as error:
            raise RegistryError(
                f"artefact of {name} version {version} is unusable: {error}. "
                "Move the alias to a sound version."
            ) from error
        if digest_of(policy) != held.tags.get(DIGEST_TAG):
            raise RegistryError(f"artefact of {name} version {version} is another policy's")
        return replace(policy, version=version)

    def _version_of(self, name: str, digest: str) -> int | None:
        found = self._client.search_model_versions(
            f"name = '{name}' and tags.{DIGEST_TAG} = '{digest}'"
        )
        return min((int(version.version) for version in found), default=None)

    @property
    def _client(self) -> Any:
        return self._connection.client

    @contextmanager
    def _model(self, scope: str, purpose: str) -> Iterator[str]:
        """The name of the scope's registered model, at which something is done."""
        with self._connection.reaching(purpose):
            yield self._models.known(scope)
