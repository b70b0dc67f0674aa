"""The worker's Prometheus metrics: what its status says, on the page of another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from decoder.contracts.status import SideSums, WorkerStatus
from decoder.telemetry import metrics
from tests.conftest import until
from tests.decoder.small_disk import on_small_disk


def status(process: str, **values: object) -> WorkerStatus:
    return WorkerStatus(process=process, scope="s", time=0.0, **values)


def read(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"hvd_{name}", labels)


def test_figures_are_what_came_since_and_what_is_in_force() -> None:
    sums = [SideSums(steps=n, tokens=10.0 * n, us=2e6 * n) for n in (1, 3)]
    first = status("a", tokens=5, cycles={"cache": 2}, sides={"plain": sums[0]}, fallback="none",
                   fallbacks=1)  # fmt: skip
    second = status("a", tokens=7, cycles={"cache": 3, "model": 1}, refusals={"malformed": 1},
                    sides={"plain": sums[1]}, fallbacks=1)  # fmt: skip
    for told, before, fallbacks in ((first, None, [1, 0, 0]), (second, first, [0, 0, 0])):
        metrics.publish(told, before)
        arms = [read("fallback", worker="a", arm=arm) for arm in metrics.FALLBACKS]
        assert arms == fallbacks and read("fallbacks_total", worker="a") == 1
    assert read("tokens_total", worker="a") == 7
    assert [read("cycles_total", worker="a", arm=arm) for arm in ("cache", "model")] == [3, 1]
    assert read("refusals_total", worker="a", reason="malformed") == 1
    assert read("side_tokens_total", worker="a", side="plain") == 30
    assert read("side_seconds_total", worker="a", side="plain") == 6
    assert read("serving", worker="a", scope="s") == 1


WRITER = """
from decoder.contracts.status import SideSums, WorkerStatus
from decoder.telemetry.metrics import publish
publish(WorkerStatus(process="w", scope="s", time=0.0, tokens=3, policy_version=4), None)
"""


def test_another_process_shows_what_the_worker_wrote(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WRITER], env=environment, check=True)
    MultiProcessCollector(registry := CollectorRegistry(), str(tmp_path))
    for name, value in (("tokens_total", 3), ("policy_version", 4)):
        assert registry.get_sample_value(f"hvd_{name}", {"worker": "w"}) == value


PAGE = """
import logging, time
from decoder.contracts.status import WorkerStatus
from decoder.telemetry.metrics import MetricsPage
logging.basicConfig()
said = []
def say():
    said.append(1)
    return WorkerStatus(process="w", scope="s", time=0.0, tokens=3)
page = MetricsPage(say, every_s=0.01)
page.start()
until = time.monotonic() + 300.0
while len(said) < 3:
    assert time.monotonic() < until
    time.sleep(0.01)
page.close()
print("alive")
"""


def test_on_a_full_disk_nothing_is_published_and_nobody_is_ended(tmp_path: Path) -> None:
    done = on_small_disk(tmp_path, "PROMETHEUS_MULTIPROC_DIR", PAGE, 8, 2)
    assert done.returncode == 0, done
    assert done.stdout.split() == ["alive", "filled"], "no file that no page can be made of"
    assert done.stderr.count("metrics were not published") == 1, done.stderr


def test_a_status_that_cannot_be_made_ends_no_page_and_none_is_counted_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[int] = []

    def say() -> WorkerStatus:
        said.append(1)
        if len(said) == 1:
            raise RuntimeError("not yet")
        if len(said) == 3:
            monkeypatch.undo()
        return status("half", tokens=5)

    monkeypatch.setattr(metrics, "FALLBACKS", None)  # fails at the end, after the counters
    page = metrics.MetricsPage(say, every_s=0.01)
    page.start()
    until(lambda: len(said) >= 5, "the page to go on")
    page.close()
    assert read("tokens_total", worker="half") == 5
    assert "were not published" in caplog.text


GROWS = """
import os, sys
from decoder.telemetry import mapped
mapped.install()
from prometheus_client import CollectorRegistry, Counter, generate_latest, multiprocess

folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
def page():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry).decode()

counter = Counter("asked", "Asked.", ["of"])
for number in range(2_000):  # more than the 64 KiB that there are
    counter.labels(str(number)).inc()
told = page().count("asked_total{")
print(0 < told < 2_000, counter.labels("1999")._value.get() == 1.0)
os.system(f"rm {folder}/*")  # whatever somebody does to it
counter.labels("1").inc()
"""


def test_a_disk_that_fills_ends_nobody_and_is_told_of_once(tmp_path: Path) -> None:
    done = on_small_disk(tmp_path, "PROMETHEUS_MULTIPROC_DIR", GROWS, 72, 0)
    assert done.returncode == 0, done
    assert done.stdout.split()[:2] == ["True"] * 2
    assert done.stderr.count("not published") == 1
