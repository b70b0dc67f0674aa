"""What a person finds in MLflow: a name, a model that loads, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.features import FEATURES
from decoder.policy.estimate import estimate
from decoder.policy.first import first_policy
from decoder.policy.probes import to_bytes
from learner.release.registry import AliasState, Registry
from learner.release.registry.as_logged import read
from learner.release.registry.runs import code_version
from tests.conftest import random_policy
from tests.learner.stage import WARNINGS, client_of

pytestmark = WARNINGS

SCOPE = "0123456789abcdef"
SERVED = {"target": "Llama-3.1-8B", "drafter": "llama-3.1-eagle3"}
NAME = "hvd-payoff-llama-3.1-8b-llama-3.1-eagle3-01234567"
WINDOW = {
    "events": 900, "events_total": 1200, "topic": "hvd.drafts.v2", "offsets": {"0": 41, "1": 7},
    "time_from": 1.7e9, "time_to": 1.7e9 + 3600,
}  # fmt: skip


@pytest.fixture
def here(registry: Registry) -> Iterator[Registry]:
    """A notebook's mlflow, at the registry."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(registry.tracking_uri)
    yield registry
    mlflow.set_tracking_uri(before)


def drafts(n: int = 40) -> np.ndarray:
    """Features [n, features] of which the lengths are whole, 0 among them."""
    rng = np.random.default_rng(0)
    rows = (rng.random((n, len(FEATURES))) * 4).astype(np.float32)
    rows[:, FEATURES.index("draft_len")] = rng.integers(0, 90, n)
    return rows


POLICIES = (first_policy(SCOPE), random_policy(scope=SCOPE), frequency_policy(SCOPE))


@pytest.mark.parametrize("policy", POLICIES, ids=["survival", "payoff", "frequency"])
def test_a_loaded_model_predicts_as_the_policy(here: Registry, policy: Policy) -> None:
    here.move(SCOPE, "champion", here.register(policy, tags=SERVED))
    model = mlflow.pyfunc.load_model(f"models:/{NAME}@champion")
    rows, names = drafts(), model.metadata.get_input_schema().input_names()
    assert tuple(names) == FEATURES
    wanted = estimate(policy, rows)
    found = model.predict(pd.DataFrame(rows, columns=names)[sorted(names)])
    assert np.allclose(found["expected"], wanted.expected, rtol=1e-4, atol=1e-4)
    for row, curve in enumerate(found["survival"]):
        if wanted.curves is None:
            assert curve == []
        else:
            assert np.allclose(curve, wanted.curves[row, : wanted.lengths[row]], atol=1e-5)
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{NAME}/1"))
    assert not [path for path in folder.rglob("*") if path.suffix in {".pkl", ".pickle"}]
    wanted_packages = (folder / "requirements.txt").read_text().split()
    assert wanted_packages == [f"mlflow=={mlflow.__version__}", "numpy"]
    example = json.loads((folder / "input_example.json").read_text())
    assert tuple(example["columns"]) == FEATURES
    by_name = model.predict(dict(zip(names, rows.T, strict=True)))
    by_order = model.unwrap_python_model().predict(None, rows)
    assert by_name["expected"].tolist() == by_order["expected"].tolist()


def test_a_damaged_bundle_is_refused(tmp_path: Path) -> None:
    data = bytearray(to_bytes(first_policy(SCOPE)))
    (tmp_path / "sound").write_bytes(data)
    assert read(str(tmp_path / "sound"))[0]["scope"] == SCOPE
    data[-3] ^= 0x40
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(ValueError, match="digest does not match"):
        read(str(tmp_path / "damaged"))


def test_a_model_is_named_after_target_and_drafter_and_found_by_scope(registry: Registry) -> None:
    registry.register(random_policy(scope=SCOPE), tags=SERVED)
    again = Registry(registry.tracking_uri)
    assert again.alias_state(SCOPE).name == registry.alias_state(SCOPE).name == NAME
    assert again.alias_states() == {SCOPE: AliasState(SCOPE)}
    twin = SCOPE[:8] + "00000000"  # of the same names, and the same first digits
    assert again.register(random_policy(scope=twin), tags=SERVED) == 1
    assert again.alias_state(twin).name == NAME.removesuffix(SCOPE[:8]) + twin
    without = again.register(random_policy(scope="f" * 16), tags={"target": "org/A B:c"})
    assert without == 1
    assert again.alias_state("f" * 16).name == "hvd-payoff-org-a-b-c-no-drafter-ffffffff"


def test_a_model_with_an_old_name_keeps_it(registry: Registry) -> None:
    client_of(registry).create_registered_model(f"hvd-payoff-{SCOPE}")
    assert registry.register(random_policy(scope=SCOPE), tags=SERVED) == 1
    assert registry.alias_state(SCOPE).name == f"hvd-payoff-{SCOPE}"
    assert set(registry.alias_states()) == {SCOPE}


def test_a_version_describes_its_origin(registry: Registry) -> None:
    metrics = {"rate_gain": 0.5}
    told = {**SERVED, "origin": "learner", "verdict": "chooses better and is faster"}
    policy = replace(random_policy(scope=SCOPE), provenance={"costs": {"measured": False}})
    registry.register(policy, {"learner": "large", "champion": 3}, metrics, told, WINDOW)
    client, (version,) = client_of(registry), registry.versions(SCOPE)
    for wanted in (
        "learned from traffic", "version 3",
        "2023-11-14 22:13:20 to 2023-11-14 23:13:20", code_version(), "is faster",
    ):  # fmt: skip
        assert wanted in version.description
    run = client.get_run(version.run)
    assert run.data.params["window.offset_1"] == "7"
    found = client.search_model_versions(f"name = '{NAME}' and tags.target = 'Llama-3.1-8B'")
    assert [int(v.version) for v in found] == [1]
    assert run.data.metrics == metrics
