"""Policies as versions of registered models, and the aliases that say what is served.

What is served is what alias ``pinned`` names, else ``champion``. The learner moves ``candidate``
and ``champion``, and ``trial`` while nobody else has set it; ``pinned`` is a person's word alone.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import PolicyRefused, RegistryError
from decoder.policy.probes import from_bytes, to_bytes
from learner.release.registry import moves, runs
from learner.release.registry.connection import Connection
from learner.release.registry.standing import (
    LOGGED_TAG,
    SCOPE_TAG,
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
PAGE: Final = 100
DIGITS: Final = 8
"""Of a scope, in a name that says target and drafter as well."""
LONGEST: Final = 64
RETIRED: Final = "retired."
"""Begins a tag that names the files of a version that is being deleted."""


class Registry:
    """Versions of policies at one MLflow tracking URI (``sqlite:///...`` or ``http://...``).

    A registered model is a scope's, as its tag ``scope`` says. It is called ``prefix``, target,
    drafter and the scope's first digits; or ``prefix`` and the scope, as all were once, where
    workers do not say what they serve. Two deployments with prefixes of their own share a server.
    Every method raises :class:`RegistryError` when MLflow cannot be reached or refuses.
    """

    def __init__(
        self, tracking_uri: str, prefix: str = MODEL_PREFIX, registry_uri: str = ""
    ) -> None:
        """``registry_uri``: where models are registered, if not with the tracking server."""
        self.tracking_uri = tracking_uri
        self.prefix = prefix
        self._connection = Connection(tracking_uri, registry_uri)

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
        metrics: Mapping[str, float | Sequence[float]] = {},
        tags: Mapping[str, str] = {},
        window: Mapping[str, Any] = {},
    ) -> int:
        """Make ``policy`` a version, if it is none yet, and move ``candidate`` to it.

        It is logged in a run of its own, artefact first: a version exists only with its artefact,
        and after a kill at any instant the same call makes no second one. Twins are told by
        :func:`digest_of`.

        Args:
            tags: of run and version; ``target`` and ``drafter`` name the registered model, too.
            window: what the policy was trained on, as :mod:`learner.release.registry.runs` has it.

        Returns:
            The version; :meth:`load` stamps it into the policy, so that what a worker reports can
            be found here.

        Raises:
            PolicyRefused: nobody could read its bundle; nothing was made.
        """
        bundle = to_bytes(replace(policy, version=0, publication=0, share=0.0))
        from_bytes(bundle, policy.scope)
        with self._connection.reaching("register a version"):
            name, digest = self._ensured(policy.scope, tags), digest_of(policy)
            number = self._version_of(name, digest)
            if number is None:
                origin = runs.Origin(params, metrics, tags, window)
                known = {DIGEST_TAG: digest, "model": name}
                logged = runs.log_policy(self._connection, policy, bundle, known, origin)
                version = self._client.create_model_version(
                    name,
                    source=logged.artifact_location,
                    run_id=logged.source_run_id,
                    tags={
                        **tags,
                        "kind": policy.kind,
                        DIGEST_TAG: digest,
                        LOGGED_TAG: logged.model_id,
                    },
                    description=runs.description(policy, origin),
                    model_id=logged.model_id,
                )
                number = int(version.version)
            self._client.set_registered_model_alias(name, "candidate", str(number))
            return number

    def move(
        self, scope: str, alias: str, version: int | None, by: str = "", why: str = ""
    ) -> None:
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
        meanwhile. As :mod:`learner.release.registry.moves` does it.

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
        key, value = moves.tag_of(move)
        if move.alias == "champion" and move.after is not None:
            at = move.at.isoformat(timespec="seconds")
            for name_of, said in {"moved_at": at, "moved_by": move.by, "why": move.why}.items():
                self._client.set_model_version_tag(name, str(move.after), name_of, said)
        self._client.set_registered_model_tag(name, key, value)
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
        does not go at all, nor what somebody else made. Their artefacts go, too; their runs stay.

        Returns:
            The versions that were deleted, ascending.
        """
        with self._model(scope, "retire versions") as name:
            made_here = {int(v.version): v for v in self._versions(name) if DIGEST_TAG in v.tags}
            model = self._client.get_registered_model(name)
            for key, value in model.tags.items():  # of a learner that ended in the middle of it
                if key.startswith(RETIRED):
                    self._delete_files(name, key, value, made_here)
            moved = [m for m in moves.moves_in(model.tags) if m.alias == "champion"]
            served = {version for m in moved for version in (m.before, m.after)}
            order = sorted(made_here, key=lambda version: (version in served, version))
            kept, spare = _kept(model), max(len(made_here) - keep, 0)
            retired = []
            for version in sorted([version for version in order if version not in kept][:spare]):
                key = f"{RETIRED}{version}"
                value = json.dumps(
                    [made_here[version].source, made_here[version].tags.get(LOGGED_TAG)]
                )
                self._client.set_registered_model_tag(name, key, value)
                # A person may have named it meanwhile. Files go after the version: they may take
                # minutes, in which an alias would come to name a version without any.
                kept = _kept(self._client.get_registered_model(name))
                if version not in kept:
                    self._client.delete_model_version(name, str(version))
                    retired.append(version)
                self._delete_files(name, key, value, kept)
            return retired

    def _delete_files(self, name: str, key: str, value: str, stay: Container[int | None]) -> None:
        """Delete what tag ``key`` of a retired version names, unless it is one of those that
        ``stay``; then the tag. One that somebody else wrote is passed over."""
        from mlflow.exceptions import MlflowException

        try:
            version, (source, logged) = int(key.removeprefix(RETIRED)), from_json(value)
        except (ValueError, TypeError):
            return
        if version not in stay:
            try:
                if logged is not None:
                    self._client.delete_logged_model(logged)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            self._connection.files(source).delete_artifacts()
        self._client.delete_registered_model_tag(name, key)

    def standing(self, scope: str) -> Standing:
        """Where the aliases of ``scope`` stand at this moment; it has been registered before."""
        with self._model(scope, "read aliases") as name:
            return standing_of(self._client.get_registered_model(name), self.prefix)

    def standings(self) -> dict[str, Standing]:
        """Every scope that has a registered model under this prefix."""
        standings: dict[str, Standing] = {}
        with self._connection.reaching("list models"):
            for model in self._models(f"name LIKE '{self.prefix}%'"):
                standing = standing_of(model, self.prefix)
                standings.setdefault(standing.scope, standing)
        return standings

    def versions(self, scope: str) -> list[Version]:
        """All versions of ``scope``, ascending."""
        with self._model(scope, "list versions") as name:
            aliases = self._client.get_registered_model(name).aliases
            versions = [version_of(version, aliases) for version in self._versions(name)]
        return sorted(versions, key=lambda version: version.number)

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
            record = self._client.get_model_version(name, str(version))
            path = self._connection.files(record.source).download_artifacts(ARTIFACT, folder)
            data = Path(path).read_bytes()
        try:
            policy = from_bytes(data, scope)
        except PolicyRefused as error:
            raise RegistryError(
                f"artefact of {name} version {version} is unusable: {error}. "
                "Move the alias to a sound version."
            ) from error
        if digest_of(policy) != record.tags.get(DIGEST_TAG):
            raise RegistryError(f"artefact of {name} version {version} is another policy's")
        return replace(policy, version=version)

    def _version_of(self, name: str, digest: str) -> int | None:
        twins = self._client.search_model_versions(
            f"name = '{name}' and tags.{DIGEST_TAG} = '{digest}'"
        )
        return min((int(version.version) for version in twins), default=None)

    @property
    def _client(self) -> Any:
        return self._connection.client

    @contextmanager
    def _model(self, scope: str, purpose: str) -> Iterator[str]:
        """The name of the scope's registered model, at which something is done."""
        with self._connection.reaching(purpose):
            name = self._named(scope)
            if name is None:
                raise RegistryError(f"the registry has no model of scope {scope}")
            yield name

    def _named(self, scope: str) -> str | None:
        """The name of the scope's registered model, or None where there is none."""
        names = self._connection.models
        if scope not in names:
            tagged = self._models(f"name LIKE '{self.prefix}%' and tags.{SCOPE_TAG} = '{scope}'")
            of_old = self._models(f"name = '{self.prefix}{scope}'")
            model = next(tagged, None) or next(of_old, None)
            if model is None:
                return None
            names[scope] = model.name
        return names[scope]

    def _ensured(self, scope: str, tags: Mapping[str, str]) -> str:
        """As :meth:`_named`; it is made where there is none, and called after ``tags``."""
        name = self._named(scope)
        if name is None:
            name = self.prefix + scope
            if tags.get("target"):
                drafter = _plain(tags.get("drafter", "")) or "no-drafter"
                what = f"{self.prefix}{_plain(tags['target'])}-{drafter}-"
                taken = next(self._models(f"name = '{what}{scope[:DIGITS]}'"), None)
                name = what + (scope[:DIGITS] if taken is None else scope)
            served = {key: tags[key] for key in ("target", "drafter") if key in tags}
            self._client.create_registered_model(
                name, {SCOPE_TAG: scope, **served}, runs.model_description(scope, served)
            )
            self._connection.models[scope] = name
        return name

    def _models(self, filter_string: str) -> Iterator[Any]:
        models = _pages(self._client.search_registered_models, filter_string)
        return (m for m in models if m.name.startswith(self.prefix))  # "_" is any letter to LIKE

    def _versions(self, name: str) -> Iterator[Any]:
        return _pages(self._client.search_model_versions, f"name = '{name}'")


def _kept(model: Any) -> set[int | None]:
    """Versions that stay: those that an alias names, and the champion before this one."""
    named = {alias: int(version) for alias, version in model.aliases.items()}
    moved = (m for m in moves.moves_in(model.tags) if m.alias == "champion")
    return {*named.values(), *(m.before for m in moved if m.after == named.get("champion"))}


def _pages(search: Any, filter_string: str) -> Iterator[Any]:
    token = None
    while True:
        page = search(filter_string, max_results=PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _plain(name: str) -> str:
    """``name`` as part of a model's: what a URL and a shell leave as it is."""
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.")[:LONGEST]
