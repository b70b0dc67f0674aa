"""Two checkpoints share a scope only when their weights and drafters agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from decoder.contracts.errors import ModelError
from decoder.scope_id import checkpoint_digest, readable, scope_of


def checkpoint(path: Path, seed: int, metadata: dict[str, str] | None = None) -> str:
    path.mkdir()
    weights = np.random.default_rng(seed).random((64, 64)).astype(np.float32)
    save_file({"w": weights}, path / "model.safetensors", metadata=metadata)
    return str(path)


def test_weights_count_and_metadata_does_not(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "a", 1)
    same = checkpoint(tmp_path / "b", 1, {"written": "later"})
    other = checkpoint(tmp_path / "c", 2)
    assert scope_of(a, None) == scope_of(same, None) != scope_of(other, None)
    assert scope_of(a, other) != scope_of(a, None)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/my llama (1)/", "my-llama-1-"),
        ("/hub/models--meta-llama--Llama-3.1-8B/snapshots/0f3c", "Llama-3.1-8B"),
        ("x" * 100, "x" * 64),
    ],
)
def test_a_model_has_a_name_that_a_person_knows(model: str, name: str) -> None:
    assert readable(model) == name


def test_a_hub_name_that_is_not_here_has_a_scope_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert scope_of("nobody/nothing", None) == scope_of("nobody/nothing", None)
    assert scope_of("nobody/nothing", None) != scope_of("nobody/nothing", None, "v2")


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="safetensors"):
        checkpoint_digest(tmp_path)
