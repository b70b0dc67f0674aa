"""Servers run one at a time, each by a clock of its own, and all run on when it is over."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from pipelines.lab.bench.serve import slices
from pipelines.lab.bench.serve.slices import OwnClock, Work, in_slices

BUSY = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"
STOPPED = psutil.STATUS_STOPPED


def started() -> subprocess.Popen[bytes]:
    """The leader of a group, with a busy child."""
    made = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
    while not any(sum(c.cpu_times()[:2]) > 0.05 for c in psutil.Process(made.pid).children()):
        # before, a leader may hang in starting its child, and is not stopped while it does
        time.sleep(0.01)
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


def states(group: int) -> list[str]:
    leader = psutil.Process(group)
    return [p.status() for p in (leader, *leader.children())]


def test_only_one_server_runs_at_a_time_and_by_its_own_clock(
    servers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    send = slices._signal

    def noting(group: int, number: signal.Signals) -> None:
        if number == signal.SIGCONT and any(seconds() < 0.3 for seconds in clocks.values()):
            turns.append(group)
            deadline = time.monotonic() + 30
            while {s for each in servers for s in states(each)} != {STOPPED}:
                assert time.monotonic() < deadline, "another runs"
        send(group, number)

    clocks: dict[int, Callable[[], float]] = dict.fromkeys(servers, float)

    def work(group: int, clock: OwnClock) -> float:
        clocks[group] = clock
        while clock() < 0.3:
            time.sleep(0.005)
        return clock()

    monkeypatch.setattr(slices, "_signal", noting)
    began = time.perf_counter()
    works = {group: Work(functools.partial(work, group), int) for group in servers}
    found = in_slices(works, 0.05)
    elapsed = time.perf_counter() - began
    seconds = [s for s in found.values() if isinstance(s, float)]
    assert len(seconds) == 2 and sum(seconds) <= elapsed, found  # each clock stood for the other
    assert all(turns.count(group) > 2 for group in servers)
    assert not any(state == STOPPED for group in servers for state in states(group))


def test_who_has_answered_least_runs_next(servers: list[int]) -> None:
    quick, slow = servers
    answers = {quick: 0, slow: 0}

    def work(group: int, clock: OwnClock, each: float) -> float:
        while answers[group] < 6:
            until = clock() + each
            while clock() < until:
                time.sleep(0.002)
            answers[group] += 1
            assert abs(answers[quick] - answers[slow]) <= 4
        return clock()

    found = in_slices(
        {
            quick: Work(lambda clock: work(quick, clock, 0.02), lambda: answers[quick]),
            slow: Work(lambda clock: work(slow, clock, 0.08), lambda: answers[slow]),
        },
        0.03,
    )
    assert all(isinstance(seconds, float) for seconds in found.values()), found


def test_what_goes_wrong_with_one_is_told_and_the_others_go_on(servers: list[int]) -> None:
    def fails(clock: OwnClock) -> str:
        raise ValueError("no answer")

    gone = started()
    os.killpg(gone.pid, signal.SIGKILL)
    gone.wait()
    works = {gone.pid: Work(lambda clock: "done", int), servers[0]: Work(fails, int)}
    works[servers[1]] = works[gone.pid]
    found = in_slices(works, 0.05)
    assert isinstance(found[servers[0]], ValueError)
    assert found[servers[1]] == found[gone.pid] == "done", "one that has ended holds up nobody"
    assert not any(state == STOPPED for group in servers for state in states(group))


def test_a_benchmark_that_is_killed_leaves_nobody_stopped(servers: list[int]) -> None:
    script = (
        "import sys, time\n"
        "from pipelines.lab.bench.serve.slices import Work, in_slices\n"
        "works = {int(g): Work(lambda clock: time.sleep(60), int) for g in sys.argv[1:]}\n"
        "in_slices(works, 60)\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", script, *map(str, servers)])

    def stopped() -> bool:
        return any(state == STOPPED for group in servers for state in states(group))

    deadline = time.monotonic() + 60
    while not stopped() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stopped()
    bench.kill()
    bench.wait()
    while stopped() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stopped()
