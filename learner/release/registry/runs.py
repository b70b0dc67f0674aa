"""A candidate's run in MLflow, the model that it becomes, and what both say of its making.

The code that predicts is logged as a file and the policy as its bundle: nothing is pickled, and who
loads it by ``mlflow.pyfunc.load_model`` needs mlflow and numpy, not this project.

Of the window that a policy was trained on ``topic`` and ``offsets`` (records read when it was made:
by partition, the next one) and ``time_from``, ``time_to`` (of the drafts it may have learned from,
in seconds since the epoch) are known beside plain numbers.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import BUCKET_ENDS, MAX_DRAFT, Policy
from decoder.contracts.features import FEATURES, SCHEMA_ID
from learner.release.registry.connection import Connection
from learner.release.registry.standing import SCOPE_TAG

EXPERIMENT: Final = "hvd-learner"
PACKAGE: Final = "hybrid-verified-decoding"
CODE: Final = Path(__file__).with_name("as_logged.py")
BUNDLE: Final = "artifacts/policy.safetensors"
"""Where the bundle lies in the folder of a logged model."""
EXAMPLES: Final = 3


def logged(
    connection: Connection,
    policy: Policy,
    bundle: bytes,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    window: Mapping[str, Any],
) -> Any:
    """The logged model of ``policy``, of the bytes ``bundle``, in a run that holds what is known of
    it: its files first, and then the word that it is whole."""
    from mlflow.entities import LoggedModelOutput, Metric, Param
    from mlflow.utils.time import get_current_time_millis

    client, now = connection.client, get_current_time_millis()
    run = client.create_run(
        connection.experiment(EXPERIMENT),
        run_name=f"{tags.get('origin', 'policy')}, {policy.kind}",
        tags={**tags, SCOPE_TAG: policy.scope, "code": code_version()},
    )
    run_id = run.info.run_id
    plain = {f"window.{key}": value for key, value in window.items()}
    offsets = plain.pop("window.offsets", {})
    told = {
        **params,
        "kind": policy.kind,
        "threshold": policy.threshold,
        "use_model": policy.use_model,
        "schema_id": policy.schema_id,
        **plain,
        **{f"window.offset_{partition}": offset for partition, offset in offsets.items()},
    }
    try:
        client.log_batch(
            run_id,
            metrics=[Metric(key, float(value), now, 0) for key, value in metrics.items()],
            params=[Param(key, str(value)) for key, value in told.items()],
        )
        model = client.create_logged_model(
            run.info.experiment_id, "policy", run_id, dict(tags), model_type=policy.kind
        )
        with tempfile.TemporaryDirectory() as folder:
            path = _write(policy, bundle, Path(folder), model)
            client.log_model_artifacts(model.model_id, str(path))
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        model = client.finalize_logged_model(model.model_id, "READY")
    except Exception:
        with suppress(Exception):  # what went wrong first is what is told
            client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id)
    return model


def description(
    policy: Policy, params: Mapping[str, Any], tags: Mapping[str, str], window: Mapping[str, Any]
) -> str:
    """Markdown for a version's page; the run has what it was learned from."""
    made_by = {"learner": "learned from traffic", "first": "the first policy", "person": "by hand"}
    origin = made_by.get(tags.get("origin", ""), tags.get("origin", "of unknown origin"))
    lines = [f"Policy of kind **{policy.kind}**, {origin}, by code {code_version()}."]
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
        f"`{SCHEMA_ID}`.\n\nAlias `champion` is served, `pinned` goes before it; a version under "
        "alias `trial` is compared with what is served."
    )


def code_version() -> str:
    """Release of the project."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unreleased"


def _write(policy: Policy, bundle: bytes, folder: Path, logged: Any) -> Path:
    """Write ``policy``, of the bytes ``bundle``, into ``folder`` as the files of MLflow's
    ``logged`` model."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns of what is mlflow's to mend
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
            "features": list(FEATURES),
            "bucket_ends": list(BUCKET_ENDS),
            "longest": MAX_DRAFT,
        },
        signature=ModelSignature(
            inputs=Schema([ColSpec(DataType.double, name) for name in FEATURES]),
            outputs=Schema([ColSpec(kind, name) for name, kind in outputs.items()]),
        ),
        input_example=pd.DataFrame(rows[:EXAMPLES].astype(float), columns=FEATURES),
        pip_requirements=["numpy"],
        mlflow_model=Model(
            artifact_path=logged.artifact_location,
            model_uuid=logged.model_id,
            run_id=logged.source_run_id,
            model_id=logged.model_id,
        ),
    )
    return path
