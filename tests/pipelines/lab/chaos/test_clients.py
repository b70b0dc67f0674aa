"""What a client makes of answers that are none."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines import machine
from pipelines.lab.chaos.clients import Seen, asking
from pipelines.lab.chaos.run import faults_of
from pipelines.workloads import Prompt
from tests.conftest import until

PROMPT = Prompt("p", "chat", ())
SEVEN = f"data: {json.dumps({'choices': [{'token_ids': [7]}]})}\n\n"


@contextmanager
def serving(*first: Any) -> Iterator[str]:
    """A server that gives this answer, a status and a text, and then sevens for ever."""
    answers = itertools.chain([first], itertools.repeat((200, SEVEN)))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, text = next(answers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "text"),
    [(200, 'data: {"error": {}}\n\n'), (200, "data: 7\n\n"), (500, ""), (503, "it ends")],
)
def test_what_is_no_answer_is_an_error_or_asked_again(status: int, text: str) -> None:
    with serving(status, text) as api, asking(api, "m", [PROMPT]) as clients:
        until(lambda: all(len(seen) > 1 for seen in clients))
    seen = [*itertools.chain.from_iterable(clients)]
    assert sum(bool(each.error) for each in seen) == (status != 503)
    assert sum(each.refused for each in seen) == (status == 503)
    assert all(each.tokens == (() if each.error else (7,)) for each in seen)
    with asking(f"http://127.0.0.1:{machine.free_port()}", "m", [PROMPT]) as clients:
        pass
    assert not any(clients), "nobody listens, and nothing fails"


@pytest.mark.parametrize(
    ("tokens", "refused", "error", "faults"),
    [
        ((7, 8), 0, "", []),
        ((7, 8), 1, "", ["a request was refused"]),
        ((7,), 0, "", ["a request failed: the answer broke off"]),
        ((), 0, "HTTP 500", ["a request failed: HTTP 500"]),
        ((8,), 0, "ReadError", ["a wrong answer to p"]),
        ((7, 8, 9), 0, "", ["a wrong answer to p"]),
    ],
)
def test_an_answer_is_right_or_not(tokens: Any, refused: int, error: str, faults: Any) -> None:
    stage: Any = SimpleNamespace(answers=[(7, 8)], asked=[PROMPT])
    seen = Seen(0.0, 1.0, tokens, error, refused=refused)
    assert faults_of(seen, stage) == faults
    of_one_that_dies = [fault for fault in faults if "wrong" in fault]
    assert faults_of(seen, stage, may_fail=True, may_wait=True) == of_one_that_dies
