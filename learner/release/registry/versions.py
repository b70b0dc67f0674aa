"""Policies as versions of registered models, and the aliases that decide what is served.

Alias ``pinned`` is served if set, else ``champion``. The learner moves ``candidate`` and
``champion``, and ``trial`` unless somebody else has set it; only a person sets ``pinned``.
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
from learner.release.registry.aliases import (
    LOGGED_TAG,
    SCOPE_TAG,
    AliasState,
    Version,
    alias_state_of,
    digest_of,
    version_of,
)
from learner.release.registry.connection import Connection
from learner.settings import LearnerSettings

MODEL_PREFIX: Final = "hvd-payoff-"
ARTIFACT: Final = runs.BUNDLE
DIGEST_TAG: Final = "digest"
PAGE_SIZE: Final = 100
SCOPE_DIGITS: Final = 8  # of the scope, in a model name that has target and drafter
MAX_NAME: Final = 64
RETIRED: Final = "retired."  # prefix of a tag with the files of a version that is being deleted


class Registry:
    """Versions of policies at an MLflow tracking URI (``sqlite:///...`` or ``http://...``).

    A registered model belongs to the scope in its tag ``scope``. Its name consists of ``prefix``,
    target, drafter and the scope's first digits; or of ``prefix`` and scope where workers report no
    names, and in older releases. Deployments with different prefixes share a server. Methods raise
    :class:`RegistryError` if MLflow is unreachable or refuses.
    """

    def __init__(
        self, tracking_uri: str, prefix: str = MODEL_PREFIX, registry_uri: str = ""
    ) -> None:
        """``registry_uri``: if it is not the tracking server's."""
        self.tracking_uri = tracking_uri
        self.prefix = prefix
        self._connection = Connection(tracking_uri, registry_uri)

    @classmethod
    def of(cls, settings: LearnerSettings) -> Registry:
        """The registry of ``settings``; writes credentials to the environment, where mlflow reads
        them."""
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
        """Register ``policy``, unless it is a version already, and move ``candidate`` to it.

        A version is created after its artifact. A retry after a kill creates no second one:
        versions are identified by :func:`digest_of`.

        Args:
            tags: of run and version; ``target`` and ``drafter`` are part of the model's name.
            window: training window, as in :mod:`learner.release.registry.runs`.

        Returns:
            The version; :meth:`load` stamps it into the policy, so that workers report it.

        Raises:
            PolicyRefused: its bundle is unreadable; nothing was created.
        """
        bundle = to_bytes(replace(policy, version=0, publication=0, share=0.0))
        from_bytes(bundle, policy.scope)
        with self._connection.reaching("register a version"):
            name, digest = self._ensure_model(policy.scope, tags), digest_of(policy)
            number = self._find_version(name, digest)
            if number is None:
                origin = runs.Origin(params, metrics, tags, window)
                known = {DIGEST_TAG: digest, "model": name}
                logged = runs.log_policy(self._connection, policy, bundle, known, origin)
                own = {"kind": policy.kind, DIGEST_TAG: digest, LOGGED_TAG: logged.model_id}
                version = self._client.create_model_version(
                    name,
                    source=logged.artifact_location,
                    run_id=logged.source_run_id,
                    tags={**tags, **own},
                    description=runs.description(policy, origin),
                    model_id=logged.model_id,
                )
                number = int(version.version)
            self._client.set_registered_model_alias(name, "candidate", str(number))
            return number

    def move(
        self, scope: str, alias: str, version: int | None, by: str = "", why: str = ""
    ) -> None:
        """Move ``alias`` to ``version``, or delete it for None, unconditionally, for a person. The
        tag of the move comes first, so that a learner notices it."""
        with self._model(
            scope, f"move {alias} to version {version}" if version else f"end {alias}"
        ) as name:
            before = moves.read_alias(self._client, name, alias).version
            move = moves.AliasMove(datetime.now(UTC), alias, before, version, by, why)
            key = self._record(name, move)
            try:
                moves.set_alias(self._client, name, alias, version)
            except Exception:
                self._client.delete_registered_model_tag(name, key)
                raise

    def move_from(
        self, scope: str, alias: str, over: int | None, to: int | None, by: str, why: str
    ) -> int | None:
        """Move ``alias`` from ``over`` to ``to``, for a learner, unless somebody else moves it; the
        version that it names afterwards. See :mod:`learner.release.registry.moves`."""
        with self._model(scope, f"move {alias} to version {to}" if to else f"end {alias}") as name:
            current = moves.move_from(self._client, name, alias, over, to, by)
            if current == to:
                self._record(name, moves.AliasMove(datetime.now(UTC), alias, over, to, by, why))
            return current

    def _record(self, name: str, move: moves.AliasMove) -> str:
        """Add the tag of ``move``, and delete the oldest; its key. A champion's version also has it
        as tags of its own."""
        key, value = moves.to_tag(move)
        if move.alias == "champion" and move.after is not None:
            at = move.at.isoformat(timespec="seconds")
            for tag, text in {"moved_at": at, "moved_by": move.by, "why": move.why}.items():
                self._client.set_model_version_tag(name, str(move.after), tag, text)
        self._client.set_registered_model_tag(name, key, value)
        for expired in moves.expired_keys(self._client.get_registered_model(name).tags):
            self._client.delete_registered_model_tag(name, expired)
        return key

    def history(self, scope: str) -> list[moves.AliasMove]:
        """Recorded alias moves, oldest first."""
        return moves.moves_in(self.alias_state(scope).tags)

    def tag(self, scope: str, version: int, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        with self._model(scope, f"tag version {version}") as name:
            for key, value in tags.items():
                self._client.set_model_version_tag(name, str(version), key, value)

    def find(self, policy: Policy) -> int | None:
        """The version of ``policy``, if it is registered."""
        with self._model(policy.scope, "look for a version") as name:
            return self._find_version(name, digest_of(policy))

    def retire(self, scope: str, keep: int) -> list[int]:
        """Delete versions beyond ``keep``, the oldest without an alias first, with their artifacts;
        their runs stay.

        Former champions go last. The champion before the current one, and versions created by
        others, stay.

        Returns:
            The deleted versions, ascending.
        """
        with self._model(scope, "retire versions") as name:
            own = {int(v.version): v for v in self._versions(name) if DIGEST_TAG in v.tags}
            model = self._client.get_registered_model(name)
            for key, value in model.tags.items():  # of an interrupted retirement
                if key.startswith(RETIRED):
                    self._delete_files(name, key, value, own)
            moved = [m for m in moves.moves_in(model.tags) if m.alias == "champion"]
            served = {version for m in moved for version in (m.before, m.after)}
            order = sorted(own, key=lambda version: (version in served, version))
            protected, excess = _protected(model), max(len(own) - keep, 0)
            retired = []
            for version in sorted([v for v in order if v not in protected][:excess]):
                key = f"{RETIRED}{version}"
                value = json.dumps([own[version].source, own[version].tags.get(LOGGED_TAG)])
                self._client.set_registered_model_tag(name, key, value)
                # A person may have named it meanwhile. Files go after the version: deleting them
                # may take minutes, in which an alias could name a version without files.
                protected = _protected(self._client.get_registered_model(name))
                if version not in protected:
                    self._client.delete_model_version(name, str(version))
                    retired.append(version)
                self._delete_files(name, key, value, protected)
            return retired

    def _delete_files(
        self, name: str, key: str, value: str, protected: Container[int | None]
    ) -> None:
        """Delete the files in tag ``key`` of a retired version, unless ``protected``; then the tag.
        An invalid tag is skipped."""
        from mlflow.exceptions import MlflowException

        try:
            version, (source, logged) = int(key.removeprefix(RETIRED)), from_json(value)
        except (ValueError, TypeError):
            return
        if version not in protected:
            try:
                if logged is not None:
                    self._client.delete_logged_model(logged)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            self._connection.files(source).delete_artifacts()
        self._client.delete_registered_model_tag(name, key)

    def alias_state(self, scope: str) -> AliasState:
        """Current aliases of a registered ``scope``."""
        with self._model(scope, "read aliases") as name:
            return alias_state_of(self._client.get_registered_model(name), self.prefix)

    def alias_states(self) -> dict[str, AliasState]:
        """Aliases of all scopes with a registered model under this prefix."""
        states: dict[str, AliasState] = {}
        with self._connection.reaching("list models"):
            for model in self._models(f"name LIKE '{self.prefix}%'"):
                state = alias_state_of(model, self.prefix)
                states.setdefault(state.scope, state)
        return states

    def versions(self, scope: str) -> list[Version]:
        """All versions of ``scope``, ascending."""
        with self._model(scope, "list versions") as name:
            aliases = self._client.get_registered_model(name).aliases
            versions = [version_of(version, aliases) for version in self._versions(name)]
        return sorted(versions, key=lambda version: version.number)

    def tags(self, scope: str, version: int) -> dict[str, str]:
        """Tags of a version."""
        with self._model(scope, f"read version {version}") as name:
            return dict(self._client.get_model_version(name, str(version)).tags)

    def digest(self, scope: str, version: int) -> str:
        """Digest of a version's policy; "" for a version created by others."""
        return self.tags(scope, version).get(DIGEST_TAG, "")

    def load(self, scope: str, version: int) -> Policy:
        """Load, check and stamp the policy of a version.

        Raises:
            RegistryError: also if the artifact is missing, damaged, or of another version.
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

    def _find_version(self, name: str, digest: str) -> int | None:
        found = self._client.search_model_versions(
            f"name = '{name}' and tags.{DIGEST_TAG} = '{digest}'"
        )
        return min((int(version.version) for version in found), default=None)

    @property
    def _client(self) -> Any:
        return self._connection.client

    @contextmanager
    def _model(self, scope: str, purpose: str) -> Iterator[str]:
        """The name of the scope's registered model, for ``purpose``."""
        with self._connection.reaching(purpose):
            name = self._model_name(scope)
            if name is None:
                raise RegistryError(f"the registry has no model of scope {scope}")
            yield name

    def _model_name(self, scope: str) -> str | None:
        names = self._connection.models
        if scope not in names:
            tagged = self._models(f"name LIKE '{self.prefix}%' and tags.{SCOPE_TAG} = '{scope}'")
            older = self._models(f"name = '{self.prefix}{scope}'")
            model = next(tagged, None) or next(older, None)
            if model is None:
                return None
            names[scope] = model.name
        return names[scope]

    def _ensure_model(self, scope: str, tags: Mapping[str, str]) -> str:
        """The name of the scope's registered model, created if missing and named after ``tags``."""
        name = self._model_name(scope)
        if name is None:
            name = self.prefix + scope
            if tags.get("target"):
                drafter = _slug(tags.get("drafter", "")) or "no-drafter"
                stem = f"{self.prefix}{_slug(tags['target'])}-{drafter}-"
                taken = next(self._models(f"name = '{stem}{scope[:SCOPE_DIGITS]}'"), None)
                name = stem + (scope[:SCOPE_DIGITS] if taken is None else scope)
            served = {key: tags[key] for key in ("target", "drafter") if key in tags}
            self._client.create_registered_model(
                name, {SCOPE_TAG: scope, **served}, runs.model_description(scope, served)
            )
            self._connection.models[scope] = name
        return name

    def _models(self, filter_string: str) -> Iterator[Any]:
        models = _pages(self._client.search_registered_models, filter_string)
        return (m for m in models if m.name.startswith(self.prefix))  # "_" is a wildcard of LIKE

    def _versions(self, name: str) -> Iterator[Any]:
        return _pages(self._client.search_model_versions, f"name = '{name}'")


def _protected(model: Any) -> set[int | None]:
    """Versions under an alias, and the champion before the current one."""
    named = {alias: int(version) for alias, version in model.aliases.items()}
    moved = (m for m in moves.moves_in(model.tags) if m.alias == "champion")
    return {*named.values(), *(m.before for m in moved if m.after == named.get("champion"))}


def _pages(search: Any, filter_string: str) -> Iterator[Any]:
    token = None
    while True:
        page = search(filter_string, max_results=PAGE_SIZE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _slug(name: str) -> str:
    """``name`` as part of a model's, safe in URLs and shells."""
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.")[:MAX_NAME]
