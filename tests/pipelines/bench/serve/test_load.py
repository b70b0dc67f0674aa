"""What the serving benchmark sends: which prompts, how many at a time, and what comes back."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from decoder.contracts.errors import SettingsError
from pipelines.bench.serve.load import body, chunks, run
from pipelines.bench.serve.prompts import dealt, from_workloads
from pipelines.prompts import Prompt, PromptSet
from tests.pipelines.bench.serve.served import asked


def test_every_concurrency_gets_the_same_mix_and_no_prompt_twice() -> None:
    sets = [
        PromptSet(name, "f", tuple(asked(f"{name}{i}", name) for i in range(5))) for name in "ab"
    ]
    problems: list[str] = []
    hands = dealt(sets, 2, 3, lambda p: 1, 10, problems)
    assert [[p.dataset for p in hand] for hand in hands] == [["a", "b", "a"]] * 2
    ids = [p.id for hand in hands for p in hand]
    assert len(set(ids)) == len(ids) == 6
    assert problems == []


def test_prompts_that_do_not_fit_are_replaced_and_counted() -> None:
    lengths = {"a0": 99, "a1": 5, "a2": 5, "a3": 11, "a4": -1}

    def tokens_of(prompt: Prompt) -> int:
        if lengths[prompt.id] < 0:
            raise ValueError("the chat template refuses it")
        return lengths[prompt.id]

    sets = [PromptSet("a", "f", tuple(asked(name, "a") for name in lengths))]
    problems: list[str] = []
    hands = dealt(sets, 1, 3, tokens_of, 10, problems)
    assert [p.id for p in hands[0]] == ["a1", "a2"]
    assert problems == [
        "dataset 'a', prompt 'a4' left out: the chat template refuses it.",
        "dataset 'a': left out for more than --max-prompt-tokens 10: 2, 'a0' the first.",
        "only 2 of 3 prompts for each concurrency.",
    ]
    with pytest.raises(SettingsError, match="do not go round"):
        dealt(sets, 3, 1, tokens_of, 10, [])


def test_the_projects_own_workloads_serve_where_no_folder_is_named() -> None:
    (tools,) = from_workloads(3, ["tools"])
    assert (tools.name, len(tools.prompts)) == ("tools", 3)
    with pytest.raises(SettingsError, match="toolz"):
        from_workloads(3, ["toolz"])


def test_requests_are_greedy_and_ask_for_token_ids() -> None:
    sent = body(asked("hello").messages, "m", 7)
    assert (sent["temperature"], sent["max_tokens"], sent["return_token_ids"]) == (0, 7, True)


def test_token_ids_are_read_from_the_stream_and_errors_in_it_raise() -> None:
    lines = ['data: {"choices": [{"delta": {}}]}', "", 'data: {"choices": [{"token_ids": [1, 2]}]}']
    assert list(chunks(iter([*lines, "data: [DONE]"]))) == [([1, 2], "")]
    with pytest.raises(ValueError, match="out of room"):
        list(chunks(iter(['data: {"error": {"message": "out of room"}}'])))


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
        wall, replies = run(url, "m", prompts, 3, 1)
        stood, by_another = run(url, "m", prompts, 3, 1, clock=lambda: 5.0)
    finally:
        server.shutdown()
        server.server_close()
    assert most == 3
    assert [r.prompt for r in replies] == [f"d:{i}" for i in range(9)]
    assert all(r.tokens == (5,) and not r.error for r in replies)
    assert 0 < max(r.ttft_s for r in replies) <= max(r.latency_s for r in replies) <= wall
    timed = [(r.ttft_s, r.latency_s, r.ended_s, *r.arrivals_s) for r in by_another]
    assert stood == 0.0 and {s for one in timed for s in one} == {0.0}, "all by the clock given"


def test_a_server_that_is_not_there_is_an_error_in_the_reply() -> None:
    _, (reply,) = run("http://127.0.0.1:9", "m", [asked("a")], 1, 1)
    assert "ConnectError" in reply.error and reply.tokens == ()
