"""Runs in MLflow: a candidate's figures and data, and the model that it becomes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from decoder.contracts.bundle import Policy
from learner.registry import lineage, loadable
from learner.registry.connection import Connection
from learner.registry.standing import SCOPE_TAG

EXPERIMENT: Final = "hvd-learner"


def start(
    connection: Connection,
    policy: Policy,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    window: Mapping[str, Any],
) -> Any:
    """A run under way that holds what is known of ``policy``; whoever asked for it ends it."""
    from mlflow.entities import Metric, Param
    from mlflow.utils.time import get_current_time_millis

    client, now = connection.client, get_current_time_millis()
    run = client.create_run(
        connection.experiment(EXPERIMENT),
        run_name=f"{tags.get('origin', 'policy')}, {policy.kind}",
        tags={**tags, SCOPE_TAG: policy.scope, "code": lineage.code_version()},
    )
    run_id = run.info.run_id
    told = {**params, **lineage.parameters(policy, window)}
    client.log_batch(
        run_id,
        metrics=[Metric(key, float(value), now, 0) for key, value in metrics.items()],
        params=[Param(key, str(value)) for key, value in told.items()],
    )
    return run


def log_model(
    connection: Connection, run: Any, policy: Policy, bundle: bytes, tags: Mapping[str, str]
) -> Any:
    """The run's logged model: its files first, and then the word that it is whole."""
    from mlflow.entities import LoggedModelOutput

    client, run_id = connection.client, run.info.run_id
    logged = client.create_logged_model(
        run.info.experiment_id, "policy", run_id, dict(tags), model_type=policy.kind
    )
    with tempfile.TemporaryDirectory() as folder:
        path = loadable.write(policy, bundle, Path(folder), logged)
        client.log_model_artifacts(logged.model_id, str(path))
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return client.finalize_logged_model(logged.model_id, "READY")
