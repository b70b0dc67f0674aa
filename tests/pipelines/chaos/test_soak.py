"""What grows is told from what only moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decoder.contracts.errors import SettingsError
from pipelines.chaos.cli import chaos, soak
from pipelines.chaos.soak import silent, slope

SECONDS = [10.0 * i for i in range(180)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("hourly", "verdict"), [(0.0, "flat"), (400.0, "grows"), (-400.0, "falls"), (5.0, "flat")]
)
def test_a_line_is_seen_through_noise_and_warming_up(
    seed: int, hourly: float, verdict: str
) -> None:
    hours = np.array(SECONDS) / 3600
    noise = np.random.default_rng(seed).normal(0, 10, len(SECONDS))
    warming = 500 * np.minimum(np.array(SECONDS) / 200, 1.0)
    found = slope(SECONDS, (500 + warming + hourly * hours + noise).tolist())
    assert found.verdict == verdict
    assert found.low < found.hourly < found.high


def test_a_saw_is_flat() -> None:
    """Memory that is taken and given back, as a collector does."""
    assert slope(SECONDS, [100 + i % 17 for i in range(180)]).verdict == "flat"


def test_what_stands_still_is_flat() -> None:
    found = slope(SECONDS, [7.0] * 180)
    assert found.verdict == "flat" and found.hourly == pytest.approx(0.0, abs=1e-9)


def test_a_run_that_was_too_short_says_so() -> None:
    with pytest.raises(ValueError, match="at least 20 are needed"):
        slope(SECONDS[:20], [0.0] * 20)


def test_a_part_that_says_nothing_any_more_is_a_fault() -> None:
    (fault,) = silent({"worker": 1000.0, "learner": 969.0}, 1000.0)
    assert "learner" in fault


def test_no_trouble_is_made_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", "kafka.example.org:9092")
    for command in (chaos, soak):
        with pytest.raises(SettingsError, match="unset it"):
            command(out=tmp_path)
    assert not [*tmp_path.iterdir()]
