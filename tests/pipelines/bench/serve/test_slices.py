"""Servers run one at a time, each by a clock of its own, and all run on when it is over."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from pipelines.bench.serve.slices import OwnClock, in_slices

BUSY = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"


@pytest.fixture
def servers() -> Iterator[list[int]]:
    """Two leaders of sessions, each with a busy child."""
    made = [
        subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(2)
    ]
    try:
        while not all(psutil.Process(p.pid).children() for p in made):
            time.sleep(0.01)
        yield [p.pid for p in made]
    finally:
        for process in made:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
            process.wait()


def worker(leader: int) -> psutil.Process:
    return psutil.Process(leader).children()[0]


def are_running(leaders: list[int]) -> bool:
    every = [p for leader in leaders for p in (psutil.Process(leader), worker(leader))]
    return all(p.status() != psutil.STATUS_STOPPED for p in every)


def test_a_server_runs_while_its_clock_goes_and_at_no_other_time(servers: list[int]) -> None:
    used = {}

    def work(leader: int, clock: OwnClock) -> float:
        before = sum(worker(leader).cpu_times()[:2])
        assert clock() == pytest.approx(0.0, abs=0.1)
        while clock() < 0.5:
            time.sleep(0.005)
        used[leader] = sum(worker(leader).cpu_times()[:2]) - before
        return clock()

    began = time.perf_counter()
    works = {leader: lambda clock, leader=leader: work(leader, clock) for leader in servers}
    found = in_slices(works, 0.05)
    elapsed = time.perf_counter() - began
    assert set(found) == set(servers)
    assert all(isinstance(seconds, float) and seconds >= 0.5 for seconds in found.values())
    assert sum(s for s in found.values() if isinstance(s, float)) <= elapsed, "one at a time"
    for leader in servers:
        assert 0.0 < used[leader] < 0.5 + 0.3, "it used no more than its own time"
    assert are_running(servers)


def test_a_clock_stands_while_its_server_does() -> None:
    clock = OwnClock()
    time.sleep(0.01)
    assert clock() == 0.0
    clock.go()
    time.sleep(0.01)
    clock.stand()
    first = clock()
    time.sleep(0.01)
    assert clock() == first >= 0.01


def test_what_goes_wrong_with_one_is_told_and_the_others_go_on(servers: list[int]) -> None:
    def fails(clock: OwnClock) -> str:
        raise ValueError("no answer")

    found = in_slices({servers[0]: fails, servers[1]: lambda clock: "done"}, 0.05)
    assert isinstance(found[servers[0]], ValueError) and found[servers[1]] == "done"
    assert are_running(servers)


def test_a_server_that_has_ended_holds_up_nobody(servers: list[int]) -> None:
    worker(servers[0]).kill()
    psutil.Process(servers[0]).kill()
    found = in_slices({leader: lambda clock: "done" for leader in servers}, 0.05)
    assert set(found.values()) == {"done"}


def test_ctrl_c_leaves_nobody_stopped(servers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.bench.serve.slices.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_slices({leader: lambda clock: time.sleep(0.1) for leader in servers}, 0.05)
    assert are_running(servers)
