"""MLflow run and logged model of a policy.

The prediction code is logged as a file and the policy as its bundle: nothing is pickled, and
``mlflow.pyfunc.load_model`` needs mlflow and numpy, not this project.

A training window has plain numbers, ``topic`` and ``offsets`` (by partition, the next record when
the policy was created), and ``time_from`` and ``time_to`` (of the drafts it may have learned from,
in seconds since the epoch).
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import BUCKET_ENDS, MAX_DRAFT, Policy
from decoder.contracts.features import FEATURES, SCHEMA_ID
from learner.release.registry.aliases import SCOPE_TAG
from learner.release.registry.connection import Connection

EXPERIMENT: Final = "hvd-learner"
PACKAGE: Final = "hybrid-verified-decoding"
CODE: Final = Path(__file__).with_name("as_logged.py")
BUNDLE: Final = "artifacts/policy.safetensors"  # path of the bundle in a logged model
EXAMPLES: Final = 3
_POLICY_PARAMS: Final = ("kind", "threshold", "use_model", "schema_id")


@dataclass(frozen=True)
class Origin:
    """How a policy was created, as for :meth:`Registry.register`; a metric of several values is a
    curve."""

    params: Mapping[str, Any]
    metrics: Mapping[str, float | Sequence[float]]
    tags: Mapping[str, str]
    window: Mapping[str, Any]

    def to_batch(self, policy: Policy) -> dict[str, Any]:
        """Parameters and metrics of the run of ``policy``; each offset is a parameter."""
        from mlflow.entities import Metric, Param
        from mlflow.utils.time import get_current_time_millis

        now, metrics = get_current_time_millis(), self.metrics.items()
        window = {f"window.{key}": value for key, value in self.window.items()}
        offsets = window.pop("window.offsets", {})
        params = {
            **self.params,
            **{name: getattr(policy, name) for name in _POLICY_PARAMS},
            **window,
            **{f"window.offset_{partition}": offset for partition, offset in offsets.items()},
        }
        return {
            "metrics": [
                Metric(key, value, now, step)
                for key, values in metrics
                for step, value in enumerate(np.atleast_1d(values).astype(float).tolist())
            ],
            "params": [Param(key, str(value)) for key, value in params.items()],
        }


def log_policy(
    connection: Connection, policy: Policy, bundle: bytes, known: Mapping[str, str], origin: Origin
) -> Any:
    """Log ``policy`` as an MLflow model in a run of its own.

    The model becomes READY after its artifacts. A retry continues with the existing run and model,
    so that a server that refuses does not collect runs.

    Args:
        known: tags that identify the run and model of this policy.
    """
    from mlflow.entities import LoggedModelOutput

    client, experiment = connection.client, connection.experiment(EXPERIMENT)
    mine = " and ".join(f"tags.{key} = '{value}'" for key, value in known.items())
    models = client.search_logged_models([experiment], mine, max_results=1)
    if models and str(models[0].status) == "READY":
        return models[0]
    unfinished = f"{mine} and attributes.status != 'FINISHED'"
    runs = client.search_runs([experiment], unfinished, max_results=1)
    tags = {**origin.tags, **known}
    run = runs[0] if runs else client.create_run(
        experiment,
        run_name=f"{tags.get('origin', 'policy')}, {policy.kind}",
        tags={**tags, SCOPE_TAG: policy.scope, "code": code_version()},
    )  # fmt: skip
    run_id = run.info.run_id
    try:
        if not run.data.params:
            client.log_batch(run_id, **origin.to_batch(policy))
        model = next((each for each in models if each.source_run_id == run_id), None)
        if model is None:
            kind = policy.kind
            model = client.create_logged_model(experiment, "policy", run_id, tags, model_type=kind)
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        with tempfile.TemporaryDirectory() as folder:
            path = _write_model(policy, bundle, Path(folder), model)
            client.log_model_artifacts(model.model_id, str(path))
        model = client.finalize_logged_model(model.model_id, "READY")
    except Exception:
        with suppress(Exception):  # the first error is the one to report
            client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id)
    return model


def description(policy: Policy, origin: Origin) -> str:
    """Markdown for a version's page."""
    params, tags, window = origin.params, origin.tags, origin.window
    origins = {"learner": "learned from traffic", "first": "the first policy", "person": "by hand"}
    source = origins.get(tags.get("origin", ""), tags.get("origin", "of unknown origin"))
    lines = [f"Policy of kind **{policy.kind}**, {source}, by code {code_version()}."]
    if "verdict" in tags:
        lines += [f"Gate: {tags['verdict']}."]
    if params.get("champion"):
        lines += [f"It won over version {params['champion']}."]
    if window.get("time_to"):
        ends = (datetime.fromtimestamp(window[key], UTC) for key in ("time_from", "time_to"))
        lines += ["Drafts of " + " to ".join(f"{end:%Y-%m-%d %H:%M:%S}" for end in ends) + " UTC."]
    return "\n\n".join(lines)


def model_description(scope: str, served: Mapping[str, str]) -> str:
    """Markdown for a registered model's page."""
    of = f"`{served['target']}`" if "target" in served else "a target"
    drafter = f"drafter `{served['drafter']}`" if served.get("drafter") else "no model drafter"
    return (
        f"When to verify a cache draft for {of} with {drafter}: scope `{scope}`, features "
        f"`{SCHEMA_ID}`.\n\nAlias `champion` is served, `pinned` takes precedence; a version under "
        "alias `trial` is compared with the served one."
    )


def code_version() -> str:
    """Version of this package."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unreleased"


def _write_model(policy: Policy, bundle: bytes, folder: Path, logged: Any) -> Path:
    """Write the files of MLflow's ``logged`` model into ``folder``."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mlflow itself
        from mlflow.pyfunc import save_model
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import Array

    file, path = folder / Path(BUNDLE).name, folder / "model"
    file.write_bytes(bundle)
    rows = policy.probe_inputs if len(policy.probe_inputs) else np.ones((1, len(FEATURES)))
    outputs = {"expected": DataType.double, "survival": Array(DataType.double)}
    save_model(
        path,
        python_model=str(CODE),
        artifacts={"policy": str(file)},
        model_config={
            "features": list(FEATURES), "bucket_ends": list(BUCKET_ENDS), "longest": MAX_DRAFT,
        },
        signature=ModelSignature(
            inputs=Schema([ColSpec(DataType.double, name) for name in FEATURES]),
            outputs=Schema([ColSpec(kind, name) for name, kind in outputs.items()]),
        ),
        input_example=pd.DataFrame(rows[:EXAMPLES].astype(float), columns=FEATURES),
        pip_requirements=["numpy"],
        mlflow_model=Model(
            artifact_path=logged.artifact_location, model_uuid=logged.model_id,
            run_id=logged.source_run_id, model_id=logged.model_id,
        ),
    )  # fmt: skip
    return path
