"""Metrics in files that find no room: on a real small disk, which fills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = """
unshare --user --map-root-user --mount sh -c 'mount -t tmpfs -o size=72k none "$0" || exit 77
"$@"' "$@"
"""
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


def test_a_disk_that_fills_ends_nobody_and_is_told_of_once(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", FULL, "sh", str(tmp_path), sys.executable, "-c", GROWS],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not done.stdout and ("unshare:" in done.stderr or done.returncode == 77):
        pytest.skip("this machine lets nobody mount a small disk")
    assert done.returncode == 0, done
    assert done.stdout.split() == ["True"] * 2
    assert done.stderr.count("not published") == 1
