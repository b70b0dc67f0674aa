from __future__ import annotations

import httpx
import pytest

from decoder.contracts.errors import ProcessError
from pipelines.demo.run import phases_for, traffic_seconds
from pipelines.demo.traffic import FAILURES_ALLOWED, PLANS, Traffic, send
from pipelines.watch.ledger import Answer, Ledger
from pipelines.workloads import WORKLOADS, Prompt
from tests.pipelines.watch.records import WORKER

PROMPT = Prompt("chat-heldout-1", "chat", ({"role": "user", "content": "Name three rivers."},))


def answering(handler) -> httpx.Client:
    return httpx.Client(base_url="http://worker", transport=httpx.MockTransport(handler))


def test_a_request_names_its_workload_and_decodes_greedily() -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, __import__("json").loads(request.content)))
        return httpx.Response(200, json={"usage": {"completion_tokens": 12}})

    with answering(handler) as client:
        answer = send(client, PROMPT, "smollm2-135m")
    (path, asked), *rest = seen
    assert not rest
    assert path == "/v1/chat/completions"
    assert asked["vllm_xargs"] == {"hvd_workload": "chat"}
    assert asked["temperature"] == 0
    assert asked["messages"] == list(PROMPT.messages)
    assert (answer.tokens, answer.error, answer.workload) == (12, "", "chat")


@pytest.mark.parametrize(
    ("response", "word"),
    [
        (httpx.Response(500, text="engine died"), "engine died"),
        (httpx.Response(200, json={}), "usage"),
        (httpx.Response(200, text="<html>"), "JSON"),
    ],
)
def test_a_failed_request_is_an_answer_with_an_error(response, word) -> None:
    with answering(lambda _: response) as client:
        assert word in send(client, PROMPT, "model").error


def test_a_lost_connection_is_an_answer_with_an_error() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with answering(handler) as client:
        assert send(client, PROMPT, "model").error == "ConnectError: refused"


def test_many_failures_in_a_row_end_the_run() -> None:
    traffic = Traffic("http://worker", "model", Ledger(WORKER))
    traffic.ledger.answers.append(Answer("chat", 0.0, 1.0, 0, "HTTP 500: engine died"))
    traffic._failures = FAILURES_ALLOWED
    traffic.check()
    traffic._failures += 1
    with pytest.raises(ProcessError, match="engine died"):
        traffic.check()


def test_phases_share_the_time_and_the_drafter_is_broken_and_mended_on_one_kind_of_text() -> None:
    phases = phases_for(420.0)
    assert sum(seconds for _, seconds in phases) == pytest.approx(420.0)
    *_, sound, broken, mended = [plan for plan, _ in phases]
    assert sound.workloads == broken.workloads == mended.workloads
    assert [plan.broken for plan in (sound, broken, mended)] == [False, True, False]
    assert len(phases_for(60.0)) == 2
    assert sum(seconds for _, seconds in phases_for(60.0)) == pytest.approx(60.0)
    assert {w for plan in PLANS for w in plan.workloads} <= set(WORKLOADS)


def test_an_unasked_length_shrinks_with_a_slow_start_and_an_asked_one_does_not() -> None:
    assert traffic_seconds(None, spent=30.0) == 420.0
    assert traffic_seconds(None, spent=300.0) == 240.0
    assert traffic_seconds(None, spent=5000.0) == 60.0
    assert traffic_seconds(15.0, spent=300.0) == 900.0
