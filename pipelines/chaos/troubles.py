"""What is done to the stack, and which parts have to come back after it."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from decoder.telemetry.spill import FILE, Spill
from learner.checkpoint import previous_of
from pipelines.chaos.stage import Stage
from pipelines.stack import processes

PARTS: Final = ("broker", "registry", "learner", "worker")
CLOCK: Final = Path(__file__).parent / "clock"
JUMP_S: Final = 3600
"""By which a clock is put on, back, and wrong the other way."""
KEPT_S: Final = 3.0
"""The embedded broker saves its topics once a second: after this it has all it acknowledged."""
TAKEOVER_S: Final = 30.0
"""In which another learner has to hold the lease of one that died."""
FORMER_S: Final = 90.0
"""In which a worker has to find what a former one left: it looks once a minute."""


@dataclass(frozen=True)
class Found:
    """What was measured of a trouble, by name, and what of it must not be."""

    figures: Mapping[str, float]
    faults: tuple[str, ...] = ()


Look = Callable[[Stage], Found]
"""What there is to be looked at once all that was hit is back."""


@dataclass(frozen=True)
class Trouble:
    """``act`` makes it and returns when it is over. ``kills`` are the parts that end by it, and
    ``heals`` those that must be seen at work afterwards; ``lasts`` says when their time away is
    counted from: the end of the trouble, or else the blow. ``drains``: the worker is told to end
    and has time for what is under way, so that clients may be sent away and no request fails.
    """

    name: str
    act: Callable[[Stage, random.Random], Look | None]
    heals: tuple[str, ...]
    kills: tuple[str, ...] = ()
    lasts: bool = False
    drains: bool = False

    @property
    def forgets(self) -> bool:
        """Whether the broker dies without a warning: it may forget what it has acknowledged."""
        return "broker" in self.kills


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
            partial(_away, broker_away_s), ("broker", "learner"), lasts=True,
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
            "two learners, the first one held back",
            _two_learners, ("learner",), ("learner",), lasts=True,
        ),
        Trouble(
            "rolling restart" + (" by way of another version" if other else ""),
            partial(_rolling, other), ("learner", "worker"), lasts=True, drains=True,
        ),
        Trouble(
            "clock an hour on, an hour back",
            _clock, ("learner", "worker"), lasts=True, drains=True,
        ),
    ]  # fmt: skip
    return found


def _killed(names: tuple[str, ...], stage: Stage, draw: random.Random) -> None:
    for name in names:
        stage.kill(name)


@contextmanager
def _without_broker(stage: Stage) -> Iterator[None]:
    """No broker inside the block; it had saved what it acknowledged, so that losses can be told."""
    with stage.holding("broker"):
        with stage.frozen("worker"):
            stage.wait(KEPT_S)
            stage.kill("broker")
        yield


def _away(seconds: float, stage: Stage, draw: random.Random) -> None:
    with _without_broker(stage):
        stage.wait(seconds)


def _frozen(name: str, seconds: float, stage: Stage, draw: random.Random) -> None:
    with stage.frozen(name):
        stage.wait(seconds)


def _learner_full(stage: Stage, draw: random.Random) -> None:
    with stage.full("learner"):
        stage.wait(20.0)


def _worker_full(stage: Stage, draw: random.Random) -> None:
    with stage.full("worker"):
        _away(15.0, stage, draw)


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


def _spill(stage: Stage, draw: random.Random) -> Look:
    """Damage what a worker left behind; the next one has to say of all of it what it came to."""
    with _without_broker(stage):
        stage.wait(8.0)
        with stage.ended("worker"):
            left = [Spill(path) for path in stage.spill.rglob(f"*{FILE}")]
            events = sum(spill.rows for spill in left)
            for spill in left:
                spill.close()
                if spill.path.exists():  # one that holds nothing goes as it is closed
                    _flipped(spill.path, draw)
        stage.wait(2.0)
    return partial(_left_adds_up, events)


def _left_adds_up(left: int, stage: Stage) -> Found:
    """Compare the events that were ``left`` with what the worker of now says of them."""

    def told() -> tuple[int, int, int]:
        said = stage.heard.workers[-1]
        return said.events_former, sum(said.former_lost.values()), said.former_unread

    def is_told() -> bool:
        saved, lost, unread = told()
        return saved + lost >= left or unread > 0

    stage.within(FORMER_S, is_told)
    saved, lost, unread = told()
    figures = {"left in files": left, "of these delivered": saved, "counted as lost": lost,
               "files that could not be read": unread}  # fmt: skip
    if unread:
        return Found(figures)  # nobody can say how many were in it
    faults = () if saved + lost == left else ("what was left in files does not add up",)
    return Found(figures, faults)


def _two_learners(stage: Stage, draw: random.Random) -> Look:
    """A second learner waits for the lease, and gets it while the first one is held back."""
    part = stage.watches["learner"].part
    state = stage.home.learner.with_name("second")
    environment = {**(part.environment or {}), "HVD_LEARNER_STATE_DIR": str(state)}
    second = processes.start(
        "second learner", part.arguments, part.log.with_name("second.log"), environment,
        part.niceness,
    )  # fmt: skip
    faults: list[str] = []

    def holds(pid: int) -> bool:
        said = stage.heard.last(f"-{pid}")
        return said is not None and said.holds_lease

    def taken_over(pid: int, began: float) -> float:
        """Seconds from ``began`` until it says that it holds the lease."""
        if not stage.within(2 * TAKEOVER_S, lambda: holds(pid)):
            faults.append("nobody took the lease over")
        elif time.monotonic() - began > TAKEOVER_S:
            faults.append(f"the lease was taken over after more than {TAKEOVER_S:.0f} s")
        return round(time.monotonic() - began, 1)

    def knows_the_first() -> bool:
        said = stage.heard.last(f"-{second.process.pid}")
        return said is not None and bool(said.lease) and not said.holds_lease

    try:
        stage.until("the second learner to know of the lease", knows_the_first)
        with stage.down("learner"):
            seconds = taken_over(second.process.pid, time.monotonic())
        stage.until("the first learner to speak", lambda: _speaks(stage, "learner"))
        if holds(stage.pid("learner")):
            faults.append("two learners hold the lease")
        second.check()
    finally:
        stopped = time.monotonic()
        processes.stop([second])
    back = taken_over(stage.pid("learner"), stopped)
    figures = {"lease taken over in s": seconds, "given back in s": back}
    return lambda _: Found(figures, tuple(faults))


def _speaks(stage: Stage, name: str) -> bool:
    return stage.heard.last(f"-{stage.pid(name)}") is not None


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
