"""What ends is started again, and said: with small real processes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.stack import processes
from pipelines.stack.processes import Part, begin
from pipelines.stack.up import PartState, keep_up, supervise
from tests.conftest import until
from tests.pipelines.stack.test_processes import PARENT, runs

QUICK = 0.02
SLEEPS = "import time; print('here I am'); time.sleep(600)"
FAILS = "import sys; print('no weights to be found\\x1b[31m' + 'x' * 1000); sys.exit(3)"


@pytest.fixture
def children() -> Iterator[dict[str, processes.Child]]:
    made: dict[str, processes.Child] = {}
    yield made
    processes.stop(list(made.values()))


def part(code: str, folder: Path, name: str = "learner") -> Part:
    """One that serves as soon as it runs, or never where it fails, however long that takes."""
    command = (sys.executable, "-u", "-c", code)
    return Part(name, command, folder / f"{name}.log", lambda: code != FAILS, 600.0)


def watching(
    watched: PartState, children: dict[str, processes.Child], said: list[str]
) -> Callable[[], None]:
    return lambda: supervise(watched, children, said.append, QUICK)


def test_pauses_grow_to_the_longest_and_begin_anew_after_steady_service(tmp_path, children) -> None:
    broken, said = part(FAILS, tmp_path), list[str]()
    watched = PartState(broken, serves_since=0.0)
    begin(broken, children)
    until(lambda: watched.attempts == 3, turn=watching(watched, children, said))
    seconds = []
    for tries in (0, 1, 2, 6, 10_000):
        watched.attempts, watched.due = tries, 0.0
        said.clear()
        until(
            lambda: "try in" in "".join(said),
            turn=lambda: supervise(watched, children, said.append),
        )
        seconds.append(said[-1].rpartition("try in ")[2])
    assert seconds == ["1 s", "2 s", "4 s", "60 s", "60 s"]
    # with the last line of its own life, which cannot write to the terminal, and is cut
    assert said[-1].startswith("learner ended with status 3 (learner.log: no weights to be found")
    assert "\x1b" not in said[-1] and len(said[-1]) < 300
    # the first that lives long enough is forgiven
    mended = PartState(part(SLEEPS, tmp_path), attempts=3, serves_since=None)
    until(lambda: mended.serves_since is not None, turn=watching(mended, children, said))
    supervise(mended, children, said.append, 0.0)
    assert mended.attempts == 0


def test_what_a_part_left_behind_is_cleaned_before_it_starts_again(tmp_path, children) -> None:
    registry, said = part(PARENT, tmp_path, "registry"), list[str]()
    first = begin(registry, children)
    until(lambda: bool(first.tail()))
    left = int(first.tail())
    os.kill(first.process.pid, signal.SIGKILL)
    until(
        lambda: len(said) == 1, turn=watching(PartState(registry, serves_since=0.0), children, said)
    )
    until(lambda: not runs(left))


def raises() -> bool:
    raise ValueError("a page that is no page")


@pytest.mark.parametrize(
    ("program", "is_ready", "trouble"),
    [
        (sys.executable, raises, "was not ready in time"),
        ("/no/such/program", lambda: True, "cannot be started"),
    ],
)
def test_what_does_not_start_or_get_ready_in_time_is_stopped_and_tried_again(
    program, is_ready, trouble, tmp_path, children
) -> None:
    worker = Part("worker", (program, "-c", SLEEPS), tmp_path / "log", is_ready, 0.1)
    said: list[str] = []
    watched = PartState(worker, due=0.0)
    until(lambda: len(said) == 2, turn=watching(watched, children, said))
    assert all(f"worker {trouble}" in line for line in said)
    assert watched.attempts == 2


def test_two_that_end_together_both_come_back_and_an_interrupt_ends_it(tmp_path, children) -> None:
    parts = {name: part(SLEEPS, tmp_path, name) for name in ("learner", "worker")}
    for one in parts.values():
        begin(one, children)
    before = {name: child.process.pid for name, child in children.items()}
    until(lambda: all("here I am" in child.tail() for child in children.values()))
    said: list[str] = []

    def say(what: str) -> None:
        said.append(what)
        if len(said) == 4:
            raise KeyboardInterrupt

    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(KeyboardInterrupt):
        keep_up(parts, children, say, QUICK)
    assert sorted(re.sub(r"\d+ s after", "so long after", line) for line in said) == [
        line
        for name in parts
        for line in (
            f"{name} runs again, so long after it ended",
            f"{name} was killed by signal 9 ({name}.log: here I am); next try in 0 s",
        )
    ]
    after = {name: child.process.pid for name, child in children.items()}
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())


def test_an_interrupt_at_any_moment_leaves_nothing_behind(tmp_path) -> None:
    rng = random.Random(1)
    # env: what started the tests may ignore SIGINT, and children inherit that
    python = ["env", "--default-signal", sys.executable, "-u"]
    command = [*python, "-m", "tests.pipelines.stack.flapping", str(tmp_path)]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as kept:
            assert kept.stdout is not None
            for _ in range(rng.randrange(1, 12)):
                kept.stdout.readline()
            time.sleep(rng.random() * 0.1)
            below = psutil.Process(kept.pid).children(recursive=True)
            kept.send_signal(number)
            kept.send_signal(signal.SIGINT)
            kept.stdout.read()
        _, alive = psutil.wait_procs(below, timeout=300)
        assert not alive
        assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in _line(p)]


def test_children_end_when_who_keeps_them_up_is_killed(tmp_path) -> None:
    python = [sys.executable, "-u", "-m"]
    command = [*python, "tests.pipelines.stack.flapping", str(tmp_path), "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as kept:
        assert kept.stdout is not None
        kept.stdout.readline()
        below = psutil.Process(kept.pid).children()
        kept.kill()
    _, alive = psutil.wait_procs(below, timeout=300)
    assert len(below) == 3 and not alive


def _line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())
