"""What a client makes of answers that are none."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from pipelines.chaos.clients import Client, answer_of
from pipelines.workloads import Prompt


@pytest.mark.parametrize("answer", ['{"error": {"code": 500}}', "[]", "null", "Not JSON"])
def test_what_is_no_answer_is_an_error_and_the_next_one_is_asked(answer: str) -> None:
    asked = 0

    def ask(prompt: Prompt) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        if asked > 1:
            client.stopping.set()
            return (7,)
        return tuple(json.loads(answer)["choices"][0]["token_ids"])

    client = Client(ask, [Prompt("p", "chat", ())], 0)
    client.run()
    assert [each.outcome for each in client.seen] == ["error", "answered"]
    assert client.ended.is_set()


@pytest.mark.parametrize("ending", ["abort", "length"])
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_its_server_cut_is_none(ending: str, streams: bool) -> None:
    choice = json.dumps({"choices": [{"token_ids": [7], "finish_reason": ending}]})
    said = f"data: {choice}\n\ndata: [DONE]\n\n" if streams else choice

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        api = f"http://127.0.0.1:{server.server_port}"
        if ending == "length":
            assert answer_of(api, "m", Prompt("p", "chat", ()), streams) == (7,)
        else:
            with pytest.raises(httpx.RemoteProtocolError, match="abort after 1 tokens"):
                answer_of(api, "m", Prompt("p", "chat", ()), streams)
        thread.join()


def test_a_server_that_ends_sends_requests_away_and_they_are_sent_again() -> None:
    asked = 0

    def ask(prompt: Prompt) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        if asked > 1:
            client.stopping.set()
        status = 503 if asked == 1 else 200
        request = httpx.Request("POST", "http://worker")
        httpx.Response(status, request=request).raise_for_status()
        return (7,)

    client = Client(ask, [Prompt("p", "chat", ())], 0)
    client.run()
    assert [(each.outcome, each.refused) for each in client.seen] == [("answered", 1)]


def test_an_internal_error_is_no_refusal() -> None:
    def ask(prompt: Prompt) -> tuple[int, ...]:
        client.stopping.set()
        request = httpx.Request("POST", "http://worker")
        httpx.Response(500, request=request).raise_for_status()
        return (7,)

    client = Client(ask, [Prompt("p", "chat", ())], 0)
    client.run()
    assert [each.outcome for each in client.seen] == ["error"]
