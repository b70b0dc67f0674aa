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
from learner.release.registry.connection import Connection
from learner.release.registry.standing import SCOPE_TAG

EXPERIMENT: Final = "hvd-learner"
PACKAGE: Final = "hybrid-verified-decoding"
CODE: Final = Path(__file__).with_name("as_logged.py")
BUNDLE: Final = "artifacts/policy.safetensors"
"""Where the bundle lies in the folder of a logged model."""
EXAMPLES: Final = 3
_OF_POLICY: Final = ("kind", "threshold", "use_model", "schema_id")
"""Fields of a policy that its run has as parameters."""


@dataclass(frozen=True)
class Origin:
    """How a policy came to be, as :meth:`Registry.register` takes it; a metric of several values is
    a curve."""

    params: Mapping[str, Any]
    metrics: Mapping[str, float | Sequence[float]]
    tags: Mapping[str, str]
    window: Mapping[str, Any]

    def logged(self, policy: Policy) -> dict[str, Any]:
        """Parameters and metrics of the run of ``policy``; offsets are a parameter each."""
        from mlflow.entities import Metric, Param
        from mlflow.utils.time import get_current_time_millis

        now, metrics = get_current_time_millis(), self.metrics.items()
        window = {f"window.{key}": value for key, value in self.window.items()}
        offsets = window.pop("window.offsets", {})
        params = {
            **self.params,
            **{name: getattr(policy, name) for name in _OF_POLICY},
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
    """Log ``policy``, whose bundle is ``bundle``, as a model of MLflow's in a run of its own.

    Artefacts come first, then status READY. A call after one that failed, or that no version came
    of, continues with the run and the model that are there: a server that refuses would else
    collect a run with every attempt.

    Args:
        known: tags by which an earlier call's run and model are found; of no other policy.
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
            client.log_batch(run_id, **origin.logged(policy))
        model = next((each for each in models if each.source_run_id == run_id), None)
        if model is None:
            kind = policy.kind
            model = client.create_logged_model(experiment, "policy", run_id, tags, model_type=kind)
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        with tempfile.TemporaryDirectory() as folder:
            path = _write(policy, bundle, Path(folder), model)
            client.log_model_artifacts(model.model_id, str(path))
        model = client.finalize_logged_model(model.model_id, "READY")
    except Exception:
        with suppress(Exception):  # the first error is the one to report
            client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id)
    return model


def description(policy: Policy, origin: Origin) -> str:
    """Markdown for a version's page; the run has what it was learned from."""
    params, tags, window = origin.params, origin.tags, origin.window
    made_by = {"learner": "learned from traffic", "first": "the first policy", "person": "by hand"}
    made = made_by.get(tags.get("origin", ""), tags.get("origin", "of unknown origin"))
    lines = [f"Policy of kind **{policy.kind}**, {made}, by code {code_version()}."]
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
