"""MLflow's client, made when it is first asked for, and one sentence for what a server lacks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from decoder.contracts.errors import RegistryError
from learner.proxies import exempt, proxy_of

log = logging.getLogger(__name__)

_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # mlflow's own seven retries of two minutes would hold a learner that is to stop
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


_ELSEWHERE: Final = (
    "let HVD_LEARNER_MLFLOW_REGISTRY_URI name an MLflow server; runs may stay where they are"
)
_LACKS: Final = {
    "'filter_string' is unsupported": "Unity Catalog takes no filters, by which a learner finds "
    f"the model of a scope: {_ELSEWHERE}",
    "registered_model_alias' is unsupported": "Databricks' workspace registry has no aliases, "
    f"which say what is served: {_ELSEWHERE}",
}
"""What is said of registries that are not enough, by what their clients say."""
_CLIENTS: Final = {"boto3": "s3", "google": "gcs", "azure": "azure"}
"""The extra that brings the client of a store, by the package that is missed."""


def database_uri(path: Path) -> str:
    """The URI by which MLflow opens the SQLite database at ``path``, whatever letters that holds;
    for this process and those that it starts.

    Relative to where they work: MLflow makes a folder of the quoted name beside an absolute one.

    Raises:
        ModuleNotFoundError: SQLAlchemy, which MLflow brings, is not installed.
    """
    from sqlalchemy.engine import URL  # its releases differ in what they quote

    return URL.create("sqlite", database=os.path.relpath(path.resolve())).render_as_string()


def database_of(uri: str) -> Path | None:
    """The file of a ``sqlite:///`` URI, as SQLAlchemy reads it; None for what names no file."""
    if not uri.startswith("sqlite:///"):
        return None
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    return Path(name).resolve() if name else None


class Connection:
    """The addresses of tracking server and registry (``sqlite:///...`` or ``http://...``), and what
    was found out about them."""

    def __init__(self, tracking_uri: str, registry_uri: str = "") -> None:
        self.tracking_uri = tracking_uri
        self.registry_uri = registry_uri or tracking_uri
        self._known: Any = None
        self.experiments: dict[str, str] = {}  # ids by name
        self.models: dict[str, str] = {}  # names by scope
        """What is a request each to find out; forgotten after any failure, in case somebody deleted
        one."""

    @property
    def client(self) -> Any:
        """The client; the first use imports mlflow."""
        if self._known is None:
            for variable, value in _ENVIRONMENT.items():
                os.environ.setdefault(variable, value)
            exempt(os.environ)  # where alone its HTTP client looks
            import mlflow

            # the first use of a database logs a hundred lines of migrations
            for noisy in ("mlflow", "alembic"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            if self._database is not None:
                self._database.parent.mkdir(parents=True, exist_ok=True)
            self._known = mlflow.MlflowClient(self.tracking_uri, self.registry_uri)
        return self._known

    def experiment(self, name: str) -> str:
        """The id of an experiment, which is made if it is new, and restored if it was deleted."""
        if name not in self.experiments:
            experiment = self.client.get_experiment_by_name(name)
            self.experiments[name] = (
                self.client.create_experiment(name, artifact_location=self._artifacts(name))
                if experiment is None
                else experiment.experiment_id
            )
            if experiment is not None and experiment.lifecycle_stage == "deleted":
                self.client.restore_experiment(experiment.experiment_id)
                log.warning(
                    "MLflow's experiment %s was deleted and is restored: nothing can be registered "
                    "without it; rename it, and another is made", name,
                )  # fmt: skip
        return self.experiments[name]

    def files(self, uri: str) -> Any:
        """MLflow's repository of the artefacts at ``uri``."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(uri, tracking_uri=self.tracking_uri)

    @contextmanager
    def reaching(self, purpose: str) -> Iterator[None]:
        """Turn what mlflow, its database driver and its HTTP client raise into RegistryError."""
        try:
            yield
        except Exception as error:  # sqlalchemy, requests and mlflow share no root
            self.experiments.clear()
            self.models.clear()
            if isinstance(error, RegistryError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            missing = (getattr(error, "name", None) or "").partition(".")[0]
            if isinstance(error, ImportError) and missing in _CLIENTS:
                first = (
                    "artefacts lie in a store whose client is not here: pip install "
                    f"'hybrid-verified-decoding[{_CLIENTS[missing]}]', or let the server pass "
                    "them on (mlflow server --serve-artifacts)"
                )
            reason = next((sentence for sign, sentence in _LACKS.items() if sign in first), first)
            where = self.tracking_uri
            if self.registry_uri != where:
                where += f" with the registry at {self.registry_uri}"
            for secret in self._passwords():
                where, reason = where.replace(secret, "***"), reason.replace(secret, "***")
            if proxy := proxy_of(self.tracking_uri) or proxy_of(self.registry_uri):
                reason += f" (asked by the proxy {proxy}; NO_PROXY names hosts that want none)"
            raise RegistryError(f"MLflow at {where} could not {purpose}: {reason}") from error

    def _passwords(self) -> set[str]:
        """Those in both addresses, read by the parsers that open them: a password may hold a space
        or a quote, at which text does not show its end. As written, and as sent."""
        passwords: set[str | None] = set()
        for uri in {self.tracking_uri, self.registry_uri}:
            with suppress(ValueError):
                passwords.add(urlsplit(uri).password)
            with suppress(Exception):  # it is no database's, and SQLAlchemy's errors share no root
                from sqlalchemy.engine import make_url

                passwords.add(make_url(uri).password)
        return {written for one in passwords if one for written in (one, unquote(one))}

    def _artifacts(self, name: str) -> str | None:
        """Beside a local database; a server decides for itself."""
        database = self._database
        return None if database is None else (database.parent / "artifacts" / name).as_uri()

    @property
    def _database(self) -> Path | None:
        return database_of(self.tracking_uri)
