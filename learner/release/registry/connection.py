"""Lazily created MLflow client, and translation of its errors."""

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
    # mlflow's default, seven retries of two minutes, would delay the learner's stop
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_ALTERNATIVE: Final = (
    "set HVD_LEARNER_MLFLOW_REGISTRY_URI to an MLflow server; runs may stay where they are"
)
_UNSUPPORTED: Final = {
    "'filter_string' is unsupported": "Unity Catalog has no filters, by which a learner finds the "
    f"model of a scope: {_ALTERNATIVE}",
    "registered_model_alias' is unsupported": "Databricks' workspace registry has no aliases, "
    f"which decide what is served: {_ALTERNATIVE}",
}
"""Explanations of errors of insufficient registries."""
_EXTRAS: Final = {"boto3": "s3", "google": "gcs", "azure": "azure"}
"""Extras of this package by the module that a store's client misses."""


def database_uri(path: Path) -> str:
    """URI by which MLflow opens the SQLite database at ``path``, whatever characters it holds, for
    this process and its children. It is relative: MLflow creates a folder of the quoted name beside
    an absolute one.

    Raises:
        ModuleNotFoundError: SQLAlchemy, a dependency of MLflow, is not installed.
    """
    from sqlalchemy.engine import URL  # its releases differ in what they quote

    return URL.create("sqlite", database=os.path.relpath(path.resolve())).render_as_string()


def database_of(uri: str) -> Path | None:
    """The file of a ``sqlite:///`` URI, as SQLAlchemy parses it; None for other URIs."""
    if not uri.startswith("sqlite:///"):
        return None
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    return Path(name).resolve() if name else None


class Connection:
    """Tracking server and registry (``sqlite:///...`` or ``http://...``), with cached lookups.

    ``experiments`` has ids by name, ``models`` names by scope, each of which costs a request; both
    are cleared after an error, in case somebody deleted one.
    """

    def __init__(self, tracking_uri: str, registry_uri: str = "") -> None:
        self.tracking_uri = tracking_uri
        self.registry_uri = registry_uri or tracking_uri
        self.experiments: dict[str, str] = {}
        self.models: dict[str, str] = {}
        self._client: Any = None

    @property
    def client(self) -> Any:
        """The client; the first use imports mlflow."""
        if self._client is None:
            for variable, value in _ENVIRONMENT.items():
                os.environ.setdefault(variable, value)
            exempt(os.environ)  # the only place where its HTTP client looks
            import mlflow

            # the first use of a database logs a hundred lines of migrations
            for noisy in ("mlflow", "alembic"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            if (database := database_of(self.tracking_uri)) is not None:
                database.parent.mkdir(parents=True, exist_ok=True)
            self._client = mlflow.MlflowClient(self.tracking_uri, self.registry_uri)
        return self._client

    def experiment(self, name: str) -> str:
        """The id of an experiment, created if missing and restored if deleted."""
        if name not in self.experiments:
            experiment = self.client.get_experiment_by_name(name)
            if experiment is None:
                database = database_of(self.tracking_uri)  # a server chooses its own location
                location = database and (database.parent / "artifacts" / name).as_uri()
                created = self.client.create_experiment(name, artifact_location=location)
                self.experiments[name] = created
                return self.experiments[name]
            self.experiments[name] = experiment.experiment_id
            if experiment.lifecycle_stage == "deleted":
                self.client.restore_experiment(experiment.experiment_id)
                log.warning(
                    "MLflow's experiment %s was deleted and is restored, as registration needs it; "
                    "rename it to have another created", name,
                )  # fmt: skip
        return self.experiments[name]

    def files(self, uri: str) -> Any:
        """MLflow's artifact repository at ``uri``."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(uri, tracking_uri=self.tracking_uri)

    @contextmanager
    def reaching(self, purpose: str) -> Iterator[None]:
        """Raise errors of mlflow, its database driver and its HTTP client as RegistryError."""
        try:
            yield
        except Exception as error:  # sqlalchemy, requests and mlflow have no common base
            self.experiments.clear()
            self.models.clear()
            if isinstance(error, RegistryError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            missing = (getattr(error, "name", None) or "").partition(".")[0]
            if isinstance(error, ImportError) and missing in _EXTRAS:
                first = (
                    "the client of the artifact store is not installed: pip install "
                    f"'hybrid-verified-decoding[{_EXTRAS[missing]}]', or let the server pass "
                    "artifacts on (mlflow server --serve-artifacts)"
                )
            reason = next((text for part, text in _UNSUPPORTED.items() if part in first), first)
            where = self.tracking_uri
            if self.registry_uri != where:
                where += f" with the registry at {self.registry_uri}"
            for secret in self._passwords():
                where, reason = where.replace(secret, "***"), reason.replace(secret, "***")
            if proxy := proxy_of(self.tracking_uri) or proxy_of(self.registry_uri):
                reason += f" (through the proxy {proxy}; NO_PROXY names hosts to reach directly)"
            raise RegistryError(f"MLflow at {where} could not {purpose}: {reason}") from error

    def _passwords(self) -> set[str]:
        """Passwords in both addresses, quoted and unquoted. They are parsed by the parsers that
        open them: a password may hold a space or a quote."""
        passwords: set[str | None] = set()
        for uri in {self.tracking_uri, self.registry_uri}:
            with suppress(ValueError):
                passwords.add(urlsplit(uri).password)
            with suppress(Exception):  # not a database; SQLAlchemy's errors have no common base
                from sqlalchemy.engine import make_url

                passwords.add(make_url(uri).password)
        return {written for one in passwords if one for written in (one, unquote(one))}
