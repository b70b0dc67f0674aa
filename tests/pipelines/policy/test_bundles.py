"""A policy bundle that a person names."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.contracts.errors import ModelError, PolicyRefused
from decoder.policy.probes import to_bytes
from pipelines.policy.bundles import load_policy
from tests.conftest import random_policy


def test_a_bundle_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load_policy(tmp_path / "none.safetensors")
    path = tmp_path / "bundle.safetensors"
    path.write_bytes(to_bytes(random_policy())[:-8])
    with pytest.raises(PolicyRefused):
        load_policy(path)
    path.write_bytes(to_bytes(random_policy()))
    assert load_policy(path).version == 1
