"""Policies in MLflow: versions, their aliases, and training runs.

The only module that imports mlflow, and it does so when a :class:`Registry` is first used: the
import takes two seconds. What is served is what alias ``pinned`` names, else ``champion``. The
learner moves ``candidate`` and ``champion``; ``pinned`` is a person's word, and nothing here writes
it.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

import numpy as np

from decoder.contracts.bundle import ROLES, Policy, pack
from decoder.contracts.errors import PolicyRefused, RegistryError
from decoder.policy.probes import from_bytes, to_bytes

MODEL_PREFIX: Final = "hvd-payoff-"
EXPERIMENT: Final = "hvd-learner"
ARTIFACT: Final = "policy/policy.safetensors"
DIGEST_TAG: Final = "digest"
PAGE: Final = 100

_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # mlflow's own seven retries of two minutes would hold a learner that is to stop
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Standing:
    """A scope in the registry: the versions that its aliases name.

    ``champion`` and ``pinned`` decide what is served, ``trial`` is what a person wants compared
    with it, ``candidate`` the last one registered. ``name`` is the registered model's.
    """

    scope: str
    champion: int | None = None
    pinned: int | None = None
    trial: int | None = None
    candidate: int | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)

    @property
    def served(self) -> int | None:
        """The version to serve."""
        return self.champion if self.pinned is None else self.pinned


def digest_of(policy: Policy) -> str:
    """What a policy is known by, whatever version, publication or role it has been given."""
    plain = replace(policy, version=0, publication=0, role=ROLES[0], share=0.0)
    bundle = pack(plain, np.zeros(len(plain.probe_inputs), np.float32))
    size = int.from_bytes(bundle[:8], "little")
    return str(json.loads(bundle[8 : 8 + size])["__metadata__"]["digest"])


class Registry:
    """Versions of policies at one MLflow tracking URI (``sqlite:///...`` or ``http://...``).

    Registered models are called ``prefix`` and the scope: two deployments with prefixes of their
    own share a server. Every method raises :class:`RegistryError` when MLflow cannot be reached or
    refuses.
    """

    def __init__(self, tracking_uri: str, prefix: str = MODEL_PREFIX) -> None:
        self.tracking_uri = tracking_uri
        self.prefix = prefix
        self._known: Any = None
        # each is a request to a server; forgotten after any failure, in case somebody deleted one
        self._models: set[str] = set()
        self._experiments: dict[str, str] = {}

    def model_name(self, scope: str) -> str:
        """The registered model of ``scope``."""
        return self.prefix + scope

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
            window: what the policy was trained on (events, requests, times); logged as parameters.

        Returns:
            The version; :meth:`load` stamps it into the policy, so that what a worker reports can
            be found here.

        Raises:
            PolicyRefused: nobody could read its bundle; nothing was made.
        """
        bundle = to_bytes(replace(policy, version=0, publication=0, share=0.0))
        from_bytes(bundle, policy.scope)
        with self._reaching("register a version"):
            name, digest = self.model_name(policy.scope), digest_of(policy)
            self._ensure_model(name)
            number = self._version_of(name, digest)
            if number is None:
                decision = {
                    "kind": policy.kind,
                    "threshold": policy.threshold,
                    "use_model": policy.use_model,
                }
                trained_on = {f"window.{key}": value for key, value in window.items()}
                run = self._client.create_run(
                    self._experiment(EXPERIMENT), run_name=name, tags=dict(tags)
                )
                run_id = run.info.run_id
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / Path(ARTIFACT).name
                    path.write_bytes(bundle)
                    self._client.log_artifact(run_id, str(path), str(Path(ARTIFACT).parent))
                self._log(run_id, {**params, **decision, **trained_on}, metrics, 0)
                self._client.set_terminated(run_id)
                version = self._client.create_model_version(
                    name,
                    source=f"{run.info.artifact_uri}/policy",
                    run_id=run_id,
                    tags={**tags, DIGEST_TAG: digest},
                )
                number = int(version.version)
            self._client.set_registered_model_alias(name, "candidate", str(number))
            return number

    def promote(self, scope: str, version: int, why: Mapping[str, str] = {}) -> None:
        """Move alias ``champion`` of ``scope`` to ``version``.

        Args:
            why: becomes tags of the version: ``moved_by``, ``why``, and figures that speak for it;
                ``moved_at`` is added, in UTC.
        """
        moved = {"moved_at": datetime.now(UTC).isoformat(timespec="seconds"), **why}
        self.tag(scope, version, moved)  # first: what was cut off in between is done again
        with self._reaching(f"promote version {version}"):
            self._client.set_registered_model_alias(
                self.model_name(scope), "champion", str(version)
            )

    def tag(self, scope: str, version: int, tags: Mapping[str, str]) -> None:
        """Set ``tags`` of a version, over those of the same names."""
        with self._reaching(f"tag version {version}"):
            for key, value in tags.items():
                self._client.set_model_version_tag(self.model_name(scope), str(version), key, value)

    def retire(self, scope: str, keep: int) -> list[int]:
        """Delete what ``scope`` has beyond ``keep`` versions, the oldest without an alias first.

        Their artefacts go, too; their runs stay.

        Returns:
            The versions that were deleted, ascending.
        """
        name = self.model_name(scope)
        with self._reaching("retire versions"):
            held = {int(v.version): v for v in self._versions(name)}
            named = {int(v) for v in self._client.get_registered_model(name).aliases.values()}
            spare = max(len(held) - keep, 0)
            retired = [version for version in sorted(held) if version not in named][:spare]
            for version in retired:
                self._client.delete_model_version(name, str(version))
                self._delete_artefact(held[version].source)
            return retired

    def _versions(self, name: str) -> Iterator[Any]:
        token = None
        while True:
            page = self._client.search_model_versions(
                f"name = '{name}'", max_results=PAGE, page_token=token
            )
            yield from page
            token = page.token
            if not token:
                return

    def _delete_artefact(self, source: str) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        get_artifact_repository(source, tracking_uri=self.tracking_uri).delete_artifacts()

    def standing(self, scope: str) -> Standing:
        """Where the aliases of ``scope`` stand at this moment; it has been registered before."""
        with self._reaching("read aliases"):
            return self._standing(self._client.get_registered_model(self.model_name(scope)))

    def standings(self) -> dict[str, Standing]:
        """Every scope that has a registered model under this prefix, read page by page."""
        found, token = {}, None
        with self._reaching("list models"):
            while True:
                models = self._client.search_registered_models(
                    f"name LIKE '{self.prefix}%'", max_results=PAGE, page_token=token
                )
                for model in models:
                    if model.name.startswith(self.prefix):  # "_" is any letter to LIKE
                        standing = self._standing(model)
                        found[standing.scope] = standing
                token = models.token
                if not token:
                    return found

    def digest(self, scope: str, version: int) -> str:
        """What the policy of a version is known by, read from the artefact of one without tag."""
        with self._reaching(f"read version {version}"):
            held = self._client.get_model_version(self.model_name(scope), str(version))
            known = held.tags.get(DIGEST_TAG)
        return digest_of(self.load(scope, version)) if known is None else str(known)

    def load(self, scope: str, version: int) -> Policy:
        """The policy of a version, read from its artefact, checked, and stamped with the version.

        Versions that were made before digests were kept have no tag: the number in the bundle has
        to do.

        Raises:
            RegistryError: also when the artefact is missing, damaged, or not this version's.
        """
        name = self.model_name(scope)
        with self._reaching(f"read version {version}"), tempfile.TemporaryDirectory() as folder:
            held = self._client.get_model_version(name, str(version))
            path = self._client.download_artifacts(held.run_id, ARTIFACT, folder)
            data = Path(path).read_bytes()
        try:
            policy = from_bytes(data, scope)
        except PolicyRefused as error:
            raise RegistryError(
                f"artefact of {name} version {version} is unusable: {error}. "
                "Move the alias to a sound version."
            ) from error
        known = held.tags.get(DIGEST_TAG)
        if policy.version not in (0, version) if known is None else digest_of(policy) != known:
            raise RegistryError(f"artefact of {name} version {version} is another policy's")
        return replace(policy, version=version)

    def champion(self, scope: str) -> Policy | None:
        """The policy that is served, or None when nothing was promoted yet.

        Raises:
            RegistryError: also when its artefact is missing, damaged, or not this version's.
        """
        standing = self.standings().get(scope)
        if standing is None or standing.served is None:
            return None
        return self.load(scope, standing.served)

    def _standing(self, model: Any) -> Standing:
        named = {alias: int(version) for alias, version in model.aliases.items()}
        return Standing(
            scope=model.name.removeprefix(self.prefix),
            champion=named.get("champion"),
            pinned=named.get("pinned"),
            trial=named.get("trial"),
            candidate=named.get("candidate"),
            name=model.name,
        )

    def _version_of(self, name: str, digest: str) -> int | None:
        found = self._client.search_model_versions(
            f"name = '{name}' and tags.{DIGEST_TAG} = '{digest}'"
        )
        return min((int(version.version) for version in found), default=None)

    @contextmanager
    def log_run(
        self,
        experiment: str,
        params: Mapping[str, Any] = {},
        tags: Mapping[str, str] = {},
        name: str | None = None,
    ) -> Iterator[Callable[[Mapping[str, float], int], None]]:
        """A training run: ``with registry.log_run("drafter", params) as log: log(metrics, step)``.

        The run ends as FINISHED, or as FAILED when the block raises.
        """
        with self._reaching("start a run"):
            run = self._client.create_run(
                self._experiment(experiment), run_name=name, tags=dict(tags)
            )
            run_id = run.info.run_id
            self._log(run_id, params, {}, 0)

        def metrics_at(metrics: Mapping[str, float], step: int = 0) -> None:
            with self._reaching("log metrics"):
                self._log(run_id, {}, metrics, step)

        status = "FAILED"
        try:
            yield metrics_at
            status = "FINISHED"
        finally:
            with self._reaching("end a run"):
                self._client.set_terminated(run_id, status)

    def _log(
        self, run_id: str, params: Mapping[str, Any], metrics: Mapping[str, float], step: int
    ) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        self._client.log_batch(
            run_id,
            metrics=[Metric(key, float(value), now, step) for key, value in metrics.items()],
            params=[Param(key, str(value)) for key, value in params.items()],
        )

    def _ensure_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        if name in self._models:
            return
        try:
            self._client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._client.create_registered_model(name)
        self._models.add(name)

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            found = self._client.get_experiment_by_name(name)
            self._experiments[name] = (
                self._client.create_experiment(name, artifact_location=self._artifacts(name))
                if found is None
                else found.experiment_id
            )
        return self._experiments[name]

    def _artifacts(self, name: str) -> str | None:
        """Beside a local database; a server decides for itself."""
        database = self._database
        return None if database is None else (database.parent / "artifacts" / name).as_uri()

    @property
    def _database(self) -> Path | None:
        if not self.tracking_uri.startswith("sqlite:///"):
            return None
        return Path(urlparse(self.tracking_uri).path[1:]).resolve()

    @property
    def _client(self) -> Any:
        if self._known is None:
            for variable, value in _ENVIRONMENT.items():
                os.environ.setdefault(variable, value)
            import mlflow

            # the first use of a database logs a hundred lines of migrations
            for noisy in ("mlflow", "alembic"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            if self._database is not None:
                self._database.parent.mkdir(parents=True, exist_ok=True)
            self._known = mlflow.MlflowClient(self.tracking_uri, self.tracking_uri)
        return self._known

    @contextmanager
    def _reaching(self, purpose: str) -> Iterator[None]:
        """Turn what mlflow, its database driver and its HTTP client raise into RegistryError."""
        try:
            yield
        except RegistryError:
            raise
        except Exception as error:  # sqlalchemy, requests and mlflow share no root
            self._models.clear()
            self._experiments.clear()
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RegistryError(
                f"MLflow at {self.tracking_uri} could not {purpose}: {first}"
            ) from error
