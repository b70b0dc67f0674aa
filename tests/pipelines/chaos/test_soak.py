"""What grows is told from what only moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decoder.contracts.errors import SettingsError
from pipelines.chaos.cli import chaos, soak
from pipelines.chaos.soak import growth


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("hourly", "verdict"), [(0.0, "flat"), (400.0, "grows"), (-400.0, "falls"), (5.0, "flat")]
)
def test_growth_is_seen_through_noise_and_warming_up(
    seed: int, hourly: float, verdict: str
) -> None:
    passed = np.arange(180) / 180  # of half an hour
    noise = np.random.default_rng(seed).normal(0, 10, 180)
    warming = 500 * np.minimum(passed * 8, 1.0)
    found = growth((500 + warming + hourly / 2 * passed + noise).tolist(), 0.5)
    assert found["verdict"] == verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([100 + i % 17 for i in range(180)], "flat"),  # memory taken and given back
        ([7.0] * 180, "flat"),
        ([7.0] * 90 + [8.0] * 90, "grows"),
        ([7.0] * 170 + [90.0] * 10, "flat"),
    ],
)
def test_a_saw_or_a_peak_is_flat_and_a_step_is_not(values: list[float], verdict: str) -> None:
    assert growth(values, 0.5)["verdict"] == verdict


def test_no_trouble_is_made_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", "kafka.example.org:9092")
    for command in (chaos, soak):
        with pytest.raises(SettingsError, match="unset HVD_KAFKA"):
            command(out=tmp_path)
    assert not [*tmp_path.iterdir()]
