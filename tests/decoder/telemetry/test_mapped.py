"""Metrics in files that find no room: on a real small disk, which fills."""

from __future__ import annotations

from pathlib import Path

from tests.decoder.small_disk import on_small_disk

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
