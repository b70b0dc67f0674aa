"""Policies in MLflow: versions, the aliases ``candidate`` and ``champion``, and training runs.

The only module that imports mlflow, and it does so when a :class:`Registry` is first used: the
import takes two seconds. Alias ``champion`` is the truth about what is served; a person may move it
in the MLflow UI. A person who wants it to stay put sets the tag ``promotion = manual`` on the
registered model: the learner then still registers candidates and promotes none.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import PolicyRefused, RegistryError
from decoder.policy.probes import from_bytes, to_bytes

MODEL_PREFIX: Final = "hvd-payoff-"
EXPERIMENT: Final = "hvd-learner"
ARTIFACT: Final = "policy/policy.safetensors"
PROMOTION_TAG: Final = "promotion"

_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # mlflow's own seven retries of two minutes would hold the loop while its server is away
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Standing:
    """A scope in the registry: the version alias ``champion`` names, and who may move it."""

    scope: str
    champion: int | None
    manual: bool


def model_name(scope: str) -> str:
    """The registered model of ``scope``."""
    return MODEL_PREFIX + scope


class Registry:
    """Versions of policies at one MLflow tracking URI (``sqlite:///...`` or ``http://...``).

    Every method raises :class:`RegistryError` when MLflow cannot be reached or refuses.
    """

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri
        self._known: Any = None
        # each is a request to a server; forgotten after any failure, in case somebody deleted one
        self._models: set[str] = set()
        self._experiments: dict[str, str] = {}

    def register(
        self,
        policy: Policy,
        params: Mapping[str, Any] = {},
        metrics: Mapping[str, float] = {},
        tags: Mapping[str, str] = {},
        window: Mapping[str, Any] = {},
    ) -> int:
        """Log ``policy`` in a run of its own, make it a new version, and move ``candidate`` to it.

        The version's number is learnt first and stamped into the bundle, so that what a worker
        reports can be found here.

        Args:
            window: what the policy was trained on (events, requests, times); logged as parameters.

        Returns:
            The version; the artefact is ``replace(policy, version=version)``.
        """
        with self._reaching("register a version"):
            name = model_name(policy.scope)
            self._ensure_model(name)
            run = self._client.create_run(
                self._experiment(EXPERIMENT), run_name=name, tags=dict(tags)
            )
            run_id = run.info.run_id
            version = self._client.create_model_version(
                name, source=f"{run.info.artifact_uri}/policy", run_id=run_id, tags=dict(tags)
            )
            number = int(version.version)
            with tempfile.TemporaryDirectory() as folder:
                bundle = Path(folder) / Path(ARTIFACT).name
                bundle.write_bytes(to_bytes(replace(policy, version=number)))
                self._client.log_artifact(run_id, str(bundle), str(Path(ARTIFACT).parent))
            trained_on = {f"window.{key}": value for key, value in window.items()}
            decision = {
                "kind": policy.kind,
                "threshold": policy.threshold,
                "use_model": policy.use_model,
            }
            self._log(run_id, {**params, **decision, **trained_on, "version": number}, metrics, 0)
            self._client.set_terminated(run_id)
            self._client.set_registered_model_alias(name, "candidate", str(number))
            return number

    def promote(self, scope: str, version: int) -> None:
        """Move alias ``champion`` of ``scope`` to ``version``."""
        with self._reaching(f"promote version {version}"):
            self._client.set_registered_model_alias(model_name(scope), "champion", str(version))

    def champion(self, scope: str) -> Policy | None:
        """The policy alias ``champion`` names, or None when nothing was promoted yet.

        Raises:
            RegistryError: also when its artefact is missing, damaged, or not this version's.
        """
        standing = self.standings().get(scope)
        if standing is None or standing.champion is None:
            return None
        return self.load(scope, standing.champion)

    def load(self, scope: str, version: int) -> Policy:
        """The policy of a version, read from its artefact and checked.

        Raises:
            RegistryError: also when the artefact is missing, damaged, or not this version's.
        """
        with self._reaching(f"read version {version}"), tempfile.TemporaryDirectory() as folder:
            held = self._client.get_model_version(model_name(scope), str(version))
            path = self._client.download_artifacts(held.run_id, ARTIFACT, folder)
            data = Path(path).read_bytes()
        try:
            policy = from_bytes(data, scope)
        except PolicyRefused as error:
            raise RegistryError(
                f"artefact of {model_name(scope)} version {version} is unusable: {error}. "
                "Move alias champion to a sound version."
            ) from error
        if policy.version != version:
            raise RegistryError(
                f"artefact of {model_name(scope)} version {version} says it is {policy.version}"
            )
        return policy

    def standings(self) -> dict[str, Standing]:
        """Every scope that has a registered model, in one query."""
        with self._reaching("list models"):
            models = self._client.search_registered_models(f"name LIKE '{MODEL_PREFIX}%'")
            found = {}
            for model in models:
                scope = model.name.removeprefix(MODEL_PREFIX)
                alias = model.aliases.get("champion")
                champion = None if alias is None else int(alias)
                manual = model.tags.get(PROMOTION_TAG) == "manual"
                found[scope] = Standing(scope, champion, manual)
            return found

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
