"""What the serving benchmark sends: which prompts, how many at a time, and what is counted."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.lab.bench.serve.load import Load, chunks, cut, deal, run, turns
from pipelines.lab.bench.serve.run import session_seconds
from pipelines.prompts import PromptSet
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
    lock, barrier = threading.Lock(), threading.Barrier(3, timeout=30)
    most = active = 0

    class Meeting(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            nonlocal most, active
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                active += 1
                most = max(most, active)
            barrier.wait()  # nobody is answered before three are here
            with lock:
                active -= 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices": [{"token_ids": [5]}]}\n\n')

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
    assert most == 3
    assert [r.prompt for r in replies] == [f"d:{i}" for i in range(9)]
    assert all(r.tokens == (5,) and not r.error for r in replies)
    assert 0 < max(r.ttft_s for r in replies) <= max(r.latency_s for r in replies) <= wall
    timed = {s for r in by_another for s in (r.ttft_s, r.latency_s)}
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
