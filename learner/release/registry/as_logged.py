"""Prediction code of a logged model: reads the bundle and predicts, with numpy only.

It runs wherever ``mlflow.pyfunc.load_model`` is called, so it imports nothing of the project. A
test compares it with the other reader of bundles. Names of features and last positions of buckets
are in the model's configuration.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


def read(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Description of the policy in a bundle, and float32 arrays by name; ValueError if damaged."""
    data = Path(path).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    metadata = header.pop("__metadata__")
    arrays = {}
    for name, entry in header.items():
        first, last = (begin + offset for offset in entry["data_offsets"])
        arrays[name] = np.frombuffer(data[first:last], "<f4").reshape(entry["shape"])
    sha = hashlib.sha256(metadata["policy"].encode())
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].shape}".encode())
        sha.update(arrays[name].tobytes())
    if sha.hexdigest() != metadata["digest"]:
        raise ValueError(f"{path} is damaged: its digest does not match; restore the artefact")
    return json.loads(metadata["policy"]), arrays


class Policy(PythonModel):  # type: ignore[misc]  # mlflow is not typed
    """Predicts payoffs of cache drafts, one a row."""

    def load_context(self, context: Any) -> None:
        """Read the bundle."""
        self.policy, self.arrays = read(context.artifacts["policy"])
        self.features = list(context.model_config["features"])
        ends = np.array(context.model_config["bucket_ends"])
        positions = np.arange(1, context.model_config["longest"] + 1)
        self.bucket_of = np.searchsorted(ends, positions)

    def predict(
        self, context: object, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Predict n drafts.

        Args:
            model_input: columns of features by name, or an array [n, features] in their order.
            params: ignored.

        Returns:
            n rows: ``expected`` accepted length of the cache draft in tokens; ``survival``
            probability through each of its positions, empty for other kinds of policy.
        """
        if isinstance(model_input, dict):
            model_input = pd.DataFrame(model_input)
        if isinstance(model_input, pd.DataFrame):
            model_input = model_input[self.features]
        rows = np.asarray(model_input, np.float32)
        lengths = rows[:, self.features.index("draft_len")].astype(np.int64)
        if self.policy["kind"] == "survival":
            logits = self._network(rows)
            curves = [
                self._survival(row, length) for row, length in zip(logits, lengths, strict=True)
            ]
            expected = np.array([curve.sum() for curve in curves], np.float64)
        else:
            by_count = self.policy["kind"] == "frequency"
            raw = rows[:, self.features.index("score")] if by_count else self._network(rows)[:, 0]
            expected = np.clip(raw.astype(np.float64), 0.0, lengths)
            curves = [np.zeros(0)] * len(rows)
        return pd.DataFrame({"expected": expected, "survival": [c.tolist() for c in curves]})

    def _network(self, rows: Any) -> Any:
        """Outputs [n, outputs] for raw features [n, features]."""
        hidden = (rows - self.arrays["mean"]) / self.arrays["std"]
        layers = sum(name.endswith(".weight") for name in self.arrays)
        for n in range(layers):
            hidden = hidden @ self.arrays[f"layers.{n}.weight"] + self.arrays[f"layers.{n}.bias"]
            if n < layers - 1:
                hidden = np.maximum(hidden, 0.0)
        return hidden.astype(np.float64)

    def _survival(self, logits: Any, length: int) -> Any:
        """Survival probability through each position."""
        return np.exp(-np.cumsum(np.logaddexp(0.0, logits[self.bucket_of[:length]])))


set_model(Policy())
