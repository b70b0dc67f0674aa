"""MLflow's client for one tracking URI, made when it is first asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

from decoder.contracts.errors import RegistryError

log = logging.getLogger(__name__)

_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # mlflow's own seven retries of two minutes would hold a learner that is to stop
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Connection:
    """A tracking URI (``sqlite:///...`` or ``http://...``) and what was found out about it."""

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri
        self._known: Any = None
        # a request to a server; forgotten after any failure, in case somebody deleted one
        self._experiments: dict[str, str] = {}

    @property
    def client(self) -> Any:
        """The client; the first use imports mlflow."""
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

    def experiment(self, name: str) -> str:
        """The id of an experiment, which is made if it is new, and restored if it was deleted."""
        if name not in self._experiments:
            found = self.client.get_experiment_by_name(name)
            self._experiments[name] = (
                self.client.create_experiment(name, artifact_location=self._artifacts(name))
                if found is None
                else found.experiment_id
            )
            if found is not None and found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
                log.warning(
                    "MLflow's experiment %s was deleted and is restored: nothing can be registered "
                    "without it; rename it, and another is made", name,
                )  # fmt: skip
        return self._experiments[name]

    def files(self, uri: str) -> Any:
        """MLflow's repository of the artefacts at ``uri``."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(uri, tracking_uri=self.tracking_uri)

    @contextmanager
    def reaching(self, purpose: str) -> Iterator[None]:
        """Turn what mlflow, its database driver and its HTTP client raise into RegistryError."""
        try:
            yield
        except RegistryError:
            raise
        except Exception as error:  # sqlalchemy, requests and mlflow share no root
            self._experiments.clear()
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RegistryError(
                f"MLflow at {self.tracking_uri} could not {purpose}: {first}"
            ) from error

    @contextmanager
    def gone_or_not(self) -> Iterator[None]:
        """Pass over it where what is to be deleted is not there any more."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise

    def _artifacts(self, name: str) -> str | None:
        """Beside a local database; a server decides for itself."""
        database = self._database
        return None if database is None else (database.parent / "artifacts" / name).as_uri()

    @property
    def _database(self) -> Path | None:
        if not self.tracking_uri.startswith("sqlite:///"):
            return None
        return Path(urlparse(self.tracking_uri).path[1:]).resolve()
