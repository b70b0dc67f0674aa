"""A version as ``mlflow.pyfunc.load_model`` takes it: a folder, written before it is uploaded.

The code that predicts is logged as a file and the policy as its bundle: nothing is pickled, and who
loads it needs mlflow and numpy, not this project.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import BUCKET_ENDS, MAX_DRAFT, Policy
from decoder.contracts.features import FEATURES

CODE: Final = Path(__file__).with_name("as_logged.py")
BUNDLE: Final = "artifacts/policy.safetensors"
"""Where the bundle lies in the folder."""
EXAMPLES: Final = 3


def write(policy: Policy, bundle: bytes, folder: Path, logged: Any) -> Path:
    """Write ``policy`` as a model into ``folder``, which exists.

    Args:
        bundle: the policy's bytes.
        logged: MLflow's logged model that it becomes.

    Returns:
        The model's folder.
    """
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
    example = pd.DataFrame(rows[:EXAMPLES].astype(float), columns=FEATURES)
    signature = ModelSignature(
        inputs=Schema([ColSpec(DataType.double, name) for name in FEATURES]),
        outputs=Schema(
            [
                ColSpec(DataType.double, "expected"),
                ColSpec(Array(DataType.double), "survival"),
            ]
        ),
    )
    save_model(
        path,
        python_model=str(CODE),
        artifacts={"policy": str(file)},
        model_config={
            "features": list(FEATURES),
            "bucket_ends": list(BUCKET_ENDS),
            "longest": MAX_DRAFT,
        },
        signature=signature,
        input_example=example,
        pip_requirements=["numpy"],
        mlflow_model=Model(
            artifact_path=logged.artifact_location,
            model_uuid=logged.model_id,
            run_id=logged.source_run_id,
            model_id=logged.model_id,
        ),
    )
    return path
