"""What a client makes of answers that are none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines import machine
from pipelines.chaos.clients import CLIENTS, Seen, asking
from pipelines.chaos.run import faults_of
from pipelines.workloads import Prompt
from tests.conftest import until

PROMPT = Prompt("p", "chat", ())
SEVEN = 200, f"data: {json.dumps({'choices': [{'token_ids': [7]}]})}\n\n"


@contextmanager
def serving(*answers: tuple[int, str]) -> Iterator[str]:
    """A server that gives ``answers``, a status and a body each, and then sevens for ever."""
    left = [*answers]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, text = left.pop() if left else SEVEN
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "answer", [(200, 'data: {"error": {"code": 500}}\n\n'), (200, "data: ?\n\n"), (500, "")]
)
def test_what_is_no_answer_is_an_error_and_the_next_one_is_asked(answer: tuple[int, str]) -> None:
    with (
        serving(*[answer] * CLIENTS) as api,
        asking(api, "m", [PROMPT]) as clients,
    ):
        until(lambda: all(seen and not seen[-1].error for seen in clients))
    seen = [each for client in clients for each in client]
    assert sum(bool(each.error) for each in seen) == CLIENTS
    assert not any(each.refused for each in seen)
    assert all(each.tokens == ((7,) if not each.error else ()) for each in seen)


def test_a_server_that_ends_or_is_not_there_refuses_and_is_asked_again() -> None:
    with serving((503, "")) as api, asking(api, "m", [PROMPT]) as clients:
        until(lambda: all(clients))
    seen = [each for client in clients for each in client]
    assert sum(each.refused for each in seen) == 1
    assert all((each.tokens, each.error) == ((7,), "") for each in seen)
    with asking(f"http://127.0.0.1:{machine.free_port()}", "m", [PROMPT]) as clients:
        pass
    assert not any(clients), "nobody listened, and nothing failed"


@pytest.mark.parametrize(
    ("tokens", "error", "fault"),
    [
        ((7, 8), "", []),
        ((7,), "", ["a request failed: the answer broke off"]),
        ((), "HTTP 500", ["a request failed: HTTP 500"]),
        ((8,), "ReadError", ["a wrong answer to p"]),
        ((7, 8, 9), "", ["a wrong answer to p"]),
    ],
)
def test_an_answer_is_right_or_breaks_off_or_is_wrong(
    tokens: tuple[int, ...], error: str, fault: list[str]
) -> None:
    stage: Any = SimpleNamespace(answers=[(7, 8)], asked=[PROMPT])
    seen = Seen(0, 0.0, 1.0, 0, tokens, error)
    assert faults_of(seen, stage) == fault
    dying = [] if "failed" in "".join(fault) else fault
    assert faults_of(seen, stage, may_fail=True) == dying, "wrong is wrong also of one that dies"


def test_a_request_that_was_sent_away_is_a_fault_unless_its_server_was_ending() -> None:
    stage: Any = SimpleNamespace(answers=[(7, 8)], asked=[PROMPT])
    seen = Seen(0, 0.0, 1.0, 1, (7, 8), "")
    assert faults_of(seen, stage) and not faults_of(seen, stage, may_wait=True)
