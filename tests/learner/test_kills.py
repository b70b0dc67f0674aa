"""Killed at random instants, a learner ends where one that was never killed does, byte for byte."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.contracts.events import Origin
from learner import checkpoint
from tests.learner.conftest import Broker
from tests.learner.stream import batches, produce
from tests.learner.traffic import Traffic

REQUESTS, RECORD = 400, 50
KILLS = 6
AWAY = "http://127.0.0.1:9"
"""No registry: what won waits, and when a version is crowned depends on nobody's clock."""


def values() -> list[bytes]:
    """Two scopes in turns, poison between them."""
    found: list[bytes] = []
    ours, theirs = (
        batches(
            Traffic(seed=seed).events(REQUESTS), RECORD, Origin(f"s{seed}", "w", f"{seed:x}" * 8)
        )
        for seed in (3, 4)
    )
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        found += pair
        if number % 10 == 0:
            found += [b"poison", pair[0]]
    return found


def started(broker: Broker, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "HVD_KAFKA_BOOTSTRAP_SERVERS": broker.kafka.bootstrap_servers,
        "HVD_LEARNER_MLFLOW_TRACKING_URI": AWAY,
        "HVD_LEARNER_STATE_DIR": str(folder),
        "HVD_LEARNER_BUFFER_EVENTS": "4000",
        "HVD_LEARNER_AWAKE_SCOPES": "1",  # so that scopes rest and wake on the way
    }
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        command = [sys.executable, "-m", "tests.learner.killed"]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def read_up_to(folder: Path) -> int:
    loaded = checkpoint.load(folder / "checkpoint.safetensors")
    return 0 if loaded is None else int(loaded[1]["offsets"].get("0", 0))


def run_until(
    broker: Broker, folder: Path, done: int, how: signal.Signals, late: float = 0.0
) -> None:
    """Let a learner run until ``late`` seconds after its checkpoint has come to ``done`` records;
    then end it."""
    process = started(broker, folder)
    deadline = time.monotonic() + 240.0
    while read_up_to(folder) < done:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(late)
    process.send_signal(how)
    process.wait(60)


def state_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """All that a checkpoint holds, but for how its files are called."""
    loaded = checkpoint.load(folder / "checkpoint.safetensors")
    assert loaded is not None
    arrays, numbers = loaded
    del numbers["serial"]
    found = {"index": arrays}
    for name, entry in numbers["scopes"]:
        found[name], numbers[name] = checkpoint.read(folder / "scopes" / entry.pop("file"))
    return found, numbers


@pytest.mark.long
def test_evidence_detector_and_offsets_are_those_of_a_run_never_killed(
    broker: Broker, tmp_path: Path
) -> None:
    sent = values()
    produce(broker.kafka, sent)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_until(broker, whole, len(sent), signal.SIGTERM)
    draw = random.Random(1)
    for number in range(KILLS):
        done, late = len(sent) * number // KILLS + 1, draw.random() * 0.3
        run_until(broker, killed, done, signal.SIGKILL, late)
    run_until(broker, killed, len(sent), signal.SIGTERM)
    (arrays, numbers), (others, twins) = state_of(whole), state_of(killed)
    assert numbers == twins and arrays.keys() == others.keys()
    assert numbers["refused"] == {"malformed": REQUESTS * 20 // RECORD // 10}
    for part in arrays:
        assert arrays[part].keys() == others[part].keys()
        for name, array in arrays[part].items():
            same = array.dtype == others[part][name].dtype
            assert same and array.tobytes() == others[part][name].tobytes(), (part, name)
    assert all(np.size(array) for array in arrays["index"].values()) and numbers["waiting"]
