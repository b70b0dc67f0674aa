"""What grows is told from what only moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decoder.contracts.errors import SettingsError
from pipelines.lab.chaos.cli import chaos, soak
from pipelines.lab.chaos.run import growth

NOISE = np.random.default_rng(1).normal(500, 10, 180)
PASSED = np.arange(180) / 180  # of half an hour


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (NOISE, "flat"),
        (NOISE + 500 * np.minimum(PASSED * 8, 1.0), "flat"),  # warming up
        (NOISE + 200 * PASSED, "grows"),
        (NOISE - 200 * PASSED, "falls"),
        (NOISE / 100 + 400 + PASSED, "flat"),  # surely more, and hardly
        (100 + np.arange(180) % 17, "flat"),  # memory taken and given back
        ([7.0] * 180, "flat"),
        ([7.0] * 90 + [8.0] * 90, "grows"),
        ([7.0] * 170 + [90.0] * 10, "flat"),
    ],
)
def test_growth_is_seen_through_noise_and_warming_up(values: list[float], verdict: str) -> None:
    assert growth(values, 0.5)["verdict"] == verdict


def test_no_trouble_is_made_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", "kafka.example.org:9092")
    for command in (chaos, soak):
        with pytest.raises(SettingsError, match="unset HVD_KAFKA"):
            command(out=tmp_path)
    assert not [*tmp_path.iterdir()]
