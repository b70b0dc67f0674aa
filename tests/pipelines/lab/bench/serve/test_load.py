"""What the serving benchmark sends: which prompts, how many at a time, and what is counted."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.lab.bench.serve import load as load_module
from pipelines.lab.bench.serve.load import (
    Load,
    OwnClock,
    Work,
    chunks,
    cut,
    deal,
    in_slices,
    run,
    turns,
)
from pipelines.lab.bench.serve.run import session_seconds
from pipelines.prompts import PromptSet
from tests.conftest import until
from tests.pipelines.lab.bench.serve.served import asked, said, script


@given(
    hands=st.integers(1, 4),
    count=st.integers(1, 8),
    held=st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_every_concurrency_gets_the_same_mix_and_no_prompt_twice(
    hands: int, count: int, held: list[int]
) -> None:
    sets = [[asked(f"{name}{i}", str(name)) for i in range(n)] for name, n in enumerate(held)]
    dealt = deal([iter(each) for each in sets], hands, count)
    ids = [prompt.id for hand in dealt for prompt in hand]
    assert len(ids) == len(set(ids)) and len({len(hand) for hand in dealt}) <= 1
    # one that runs out is passed over
    assert len(ids) == hands * min(count, sum(n // hands for n in held))
    assert len({tuple(p.dataset for p in hand) for hand in dealt}) <= 1
    if min(held) >= hands * count:
        shares = [sum(p.dataset == str(name) for p in dealt[0]) for name in range(len(held))]
        assert max(shares) - min(shares) <= 1


def test_a_turn_is_what_is_said_between_two_answers_and_answers_are_never_brought() -> None:
    talk = script("a", ">hello", "one", "two", ">yes", ">and more", "three", ">no")
    assert turns(talk) == [talk.messages], "one request, as it is"
    found = cut(PromptSet("d", "f", (talk, script("b", ">only an answer"))), 2)
    assert [p.messages for p in found.prompts] == [said("one", "two", ">", "three")]
    (one,) = found.prompts
    assert [[m["content"] for m in turn] for turn in turns(one)] == [["one", "two"], ["three"]]


def test_as_many_requests_as_asked_for_are_under_way_at_a_time() -> None:
    barrier = threading.Barrier(3, timeout=300)

    class Meeting(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            barrier.wait()  # nobody is answered before three are here
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices": [{"token_ids": [5]}]}\n\n' * 2)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Meeting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        prompts = [asked(str(i)) for i in range(9)]
        url = f"http://127.0.0.1:{server.server_port}"
        wall, replies = run(Load(url, "m", 3, 1), prompts)
        stood, by_another = run(Load(url, "m", 3, 1, clock=lambda: 5.0), prompts)
    finally:
        server.shutdown()
        server.server_close()
    assert [r.prompt for r in replies] == [f"d:{i}" for i in range(9)]
    assert all(r.tokens == (5, 5) and not r.error and len(r.gaps_s) == 1 for r in replies)
    assert 0 < max(r.ttft_s for r in replies) <= max(r.latency_s for r in replies) <= wall
    timed = {s for r in by_another for s in (r.ttft_s, r.latency_s, *r.gaps_s)}
    assert (stood, timed) == (0.0, {0.0}), "all by the clock given"
    _, (reply,) = run(Load(url, "m", 1, 1), [asked("a")])
    assert "ConnectError" in reply.error and reply.tokens == (), "the server has gone"
    with pytest.raises(ValueError, match="out of room"):
        list(chunks(iter(['data: {"error": {"message": "out of room"}}'])))


def test_processor_time_is_that_of_all_processes_of_the_server() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    server = subprocess.Popen(
        [sys.executable, "-c", nested],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    server.stdout.readline()
    used = session_seconds(server.pid)
    server.communicate(b"\n")
    assert used is not None and used >= 0.3
    assert session_seconds(server.pid) is None


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
    send, answers = load_module._signal, dict.fromkeys(servers, 0)
    now = 0.0

    def waiting(running: list[Future[float]], timeout: float | None) -> None:
        nonlocal now
        ends = now + (timeout or math.inf)
        while now < ends and not running[0].done():
            now += 0.002
            time.sleep(0.002)

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

    monkeypatch.setattr(load_module, "_signal", noting)
    monkeypatch.setattr(load_module, "wait", waiting)  # on a busy machine threads wake up late
    monkeypatch.setattr(load_module, "time", SimpleNamespace(perf_counter=lambda: now))
    works = {
        group: Work(work(group, each), lambda group=group: answers[group])
        for group, each in zip(servers, (0.02, 0.08), strict=True)
    }
    found = in_slices(works, 0.03)
    seconds = [s for s in found.values() if isinstance(s, float)]
    assert len(seconds) == 2 and sum(seconds) < now + 1e-9, found  # each clock stood for the other
    assert all(turns.count(group) > 2 for group in servers)
    assert STOPPED not in states(servers)


def test_a_benchmark_that_is_killed_leaves_nobody_stopped(servers: list[int]) -> None:
    script = (
        "import sys, time\n"
        "from pipelines.lab.bench.serve.load import Work, in_slices\n"
        "works = {int(g): Work(lambda clock: time.sleep(600), int) for g in sys.argv[1:]}\n"
        "in_slices(works, 600)\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", script, *map(str, servers)])
    until(lambda: STOPPED in states(servers))
    bench.kill()
    bench.wait()
    until(lambda: STOPPED not in states(servers))
