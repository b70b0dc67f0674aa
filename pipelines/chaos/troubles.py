"""What is done to the stack, and which parts have to come back after it."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from learner.checkpoint import previous_of
from pipelines.chaos.stage import Stage
from pipelines.stack import processes

PARTS: Final = ("broker", "registry", "learner", "worker")
CLOCK: Final = Path(__file__).parent / "clock"
JUMP_S: Final = 3600
"""By which a clock is put on, back, and wrong the other way."""


@dataclass(frozen=True)
class Trouble:
    """``act`` makes it and returns when it is over. ``kills`` are the parts that end by it, and
    ``heals`` those that must be seen at work afterwards; ``begins`` says when their time away is
    counted from: the blow, or the end of the trouble.
    """

    name: str
    act: Callable[[Stage, random.Random], None]
    heals: tuple[str, ...]
    kills: tuple[str, ...] = ()
    lasts: bool = False


def troubles(other: Path | None, broker_away_s: float) -> list[Trouble]:
    """All of them, in an order in which none hides another.

    Args:
        other: a checkout of another version, for the rolling restart.
        broker_away_s: seconds for which the broker is kept away.
    """
    pairs = [*((name,) for name in PARTS), *itertools.combinations(PARTS, 2)]
    found = [
        Trouble(f"{' and '.join(names)} killed", partial(_killed, names), names, names)
        for names in sorted(pairs, key=lambda names: "worker" in names)
    ]
    found += [
        Trouble(
            f"broker away for {broker_away_s:.0f} s",
            partial(_away, "broker", broker_away_s), ("broker", "learner"), lasts=True,
        ),
        Trouble(
            "broker frozen for 20 s", partial(_frozen, "broker", 20.0), ("broker",), lasts=True
        ),
        Trouble(
            "learner frozen for 20 s", partial(_frozen, "learner", 20.0), ("learner",), lasts=True
        ),
        Trouble("a client that reads a byte a second", _slow_reader, (), lasts=True),
        Trouble("disk full for the learner, 20 s", _learner_full, ("learner",), lasts=True),
        Trouble("disk full for the worker, broker away", _worker_full, ("broker",), lasts=True),
        Trouble(
            "checkpoint damaged, learner killed",
            partial(_checkpoint, _flipped), ("learner",), ("learner",),
        ),
        Trouble(
            "checkpoint cut short, learner killed",
            partial(_checkpoint, _cut), ("learner",), ("learner",),
        ),
        Trouble("spill damaged, worker killed", _spill, ("worker", "broker"), ("worker",), True),
        Trouble(
            "two learners, the first one killed",
            _two_learners, ("learner",), ("learner",), lasts=True,
        ),
        Trouble(
            "rolling restart" + (" by way of another version" if other else ""),
            partial(_rolling, other), ("learner", "worker"), ("worker",), lasts=True,
        ),
        Trouble(
            "clock an hour on, an hour back",
            _clock, ("learner", "worker"), ("worker",), lasts=True,
        ),
    ]  # fmt: skip
    return found


def _killed(names: tuple[str, ...], stage: Stage, draw: random.Random) -> None:
    for name in names:
        stage.kill(name)


def _away(name: str, seconds: float, stage: Stage, draw: random.Random) -> None:
    with stage.down(name):
        stage.wait(seconds)


def _frozen(name: str, seconds: float, stage: Stage, draw: random.Random) -> None:
    with stage.frozen(name):
        stage.wait(seconds)


def _learner_full(stage: Stage, draw: random.Random) -> None:
    with stage.full("learner"):
        stage.wait(20.0)


def _worker_full(stage: Stage, draw: random.Random) -> None:
    with stage.full("worker"):
        _away("broker", 15.0, stage, draw)


def _slow_reader(stage: Stage, draw: random.Random) -> None:
    """Ask for a long stream and hardly read it; the others must not wait."""
    host, port = stage.stack.api.removeprefix("http://").split(":")
    body = (
        f'{{"model": "{stage.stack.model}", "max_tokens": 200, "stream": true, '
        '"messages": [{"role": "user", "content": "Count to one hundred."}]}'
    )
    asked = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(asked.encode())
        for _ in range(15):
            connection.recv(1)
            stage.wait(1.0)


def _flipped(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(8):
        data[draw.randrange(len(data))] ^= 0xFF
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(1, path.stat().st_size))


def _checkpoint(
    harm: Callable[[Path, random.Random], None], stage: Stage, draw: random.Random
) -> None:
    newest = stage.home.learner / "checkpoint.safetensors"
    with stage.down("learner"):
        for path in (newest, previous_of(newest))[: draw.randint(1, 2)]:
            if path.exists() and path.stat().st_size > 1:
                harm(path, draw)


def _spill(stage: Stage, draw: random.Random) -> None:
    with stage.down("broker"):
        stage.wait(8.0)
        with stage.down("worker"):
            for path in stage.spill.rglob("*.records"):
                _flipped(path, draw)
        stage.wait(2.0)


def _two_learners(stage: Stage, draw: random.Random) -> None:
    """A second learner waits for the lease, which may pass to it: it lives on, and publications
    stay in order. Who took over is not looked at."""
    part = stage.watches["learner"].part
    state = stage.home.learner.with_name("second")
    environment = {**(part.environment or {}), "HVD_LEARNER_STATE_DIR": str(state)}
    second = processes.start(
        "second learner", part.arguments, part.log.with_name("second.log"), environment,
        part.niceness,
    )  # fmt: skip
    try:
        stage.wait(25.0)
        stage.kill("learner")
        stage.wait(40.0)
        second.check()
    finally:
        processes.stop([second])


def _rolling(other: Path | None, stage: Stage, draw: random.Random) -> None:
    ours = os.environ.get("PYTHONPATH", "")
    for name in ("learner", "worker"):
        for home in (other, None) if other else (None,):
            stage.start_again(name, {"PYTHONPATH": ours if home is None else str(home)})
            stage.wait(5.0)


def _clock(stage: Stage, draw: random.Random) -> None:
    """Not by libfaketime: under 0.9.10, Python 3.11 cannot sleep any more after such a jump."""
    file, ours = stage.root / "clock", os.environ.get("PYTHONPATH", "")
    file.write_text("0", encoding="ascii")
    shown = {"PYTHONPATH": os.pathsep.join((str(CLOCK), ours)), "CHAOS_CLOCK": str(file)}
    for name in ("learner", "worker"):
        stage.start_again(name, shown)
    for seconds in (JUMP_S, 0, -JUMP_S, 0):
        stage.wait(8.0)
        file.write_text(str(seconds), encoding="ascii")
    stage.wait(8.0)
    for name in ("learner", "worker"):
        stage.start_again(name, {"PYTHONPATH": ours})
