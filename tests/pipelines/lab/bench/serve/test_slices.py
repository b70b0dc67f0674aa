"""Servers run one at a time, each by a clock of its own, and all run on when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from pipelines.lab.bench.serve import load
from pipelines.lab.bench.serve.load import OwnClock, Work, in_slices
from tests.conftest import until

BUSY = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"
STOPPED = psutil.STATUS_STOPPED


def started() -> subprocess.Popen[bytes]:
    """The leader of a group, with a busy child."""
    made = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
    # before, a leader may hang in starting its child, and is not stopped while it does
    until(lambda: any(sum(c.cpu_times()[:2]) > 0.05 for c in psutil.Process(made.pid).children()))
    return made


@pytest.fixture
def servers() -> Iterator[list[int]]:
    made = [started(), started()]
    try:
        yield [p.pid for p in made]
    finally:
        for process in made:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def states(groups: list[int]) -> list[str]:
    leaders = [psutil.Process(group) for group in groups]
    return [p.status() for leader in leaders for p in (leader, *leader.children())]


def test_one_server_runs_at_a_time_by_its_own_clock_and_who_has_answered_least_is_next(
    servers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    send, answers = load._signal, dict.fromkeys(servers, 0)

    def noting(group: int, number: signal.Signals) -> None:
        if number == signal.SIGCONT and any(done < 6 for done in answers.values()):
            turns.append(group)
            until(lambda: set(states(servers)) == {STOPPED}, "none running")
        send(group, number)

    def work(group: int, each: float) -> Callable[[OwnClock], float]:
        def runs(clock: OwnClock) -> float:
            while answers[group] < 6:
                ready = clock() + each
                while clock() < ready:
                    time.sleep(0.002)
                answers[group] += 1
                assert max(answers.values()) - min(answers.values()) <= 4
            return clock()

        return runs

    monkeypatch.setattr(load, "_signal", noting)
    began = time.perf_counter()
    works = {
        group: Work(work(group, each), lambda group=group: answers[group])
        for group, each in zip(servers, (0.02, 0.08), strict=True)
    }
    found = in_slices(works, 0.03)
    elapsed = time.perf_counter() - began
    seconds = [s for s in found.values() if isinstance(s, float)]
    assert len(seconds) == 2 and sum(seconds) <= elapsed, found  # each clock stood for the other
    assert all(turns.count(group) > 2 for group in servers)
    assert STOPPED not in states(servers)


def test_a_benchmark_that_is_killed_leaves_nobody_stopped(servers: list[int]) -> None:
    script = (
        "import sys, time\n"
        "from pipelines.lab.bench.serve.load import Work, in_slices\n"
        "works = {int(g): Work(lambda clock: time.sleep(60), int) for g in sys.argv[1:]}\n"
        "in_slices(works, 60)\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", script, *map(str, servers)])
    until(lambda: STOPPED in states(servers))
    bench.kill()
    bench.wait()
    until(lambda: STOPPED not in states(servers))
