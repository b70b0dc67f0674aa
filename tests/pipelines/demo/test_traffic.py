from __future__ import annotations

import json
from unittest.mock import Mock

import httpx
import pytest

from decoder.contracts.errors import ProcessError
from pipelines.demo.run import phases_for, traffic_seconds
from pipelines.demo.traffic import FAILURES_ALLOWED, PLANS, Traffic
from pipelines.watch.ledger import Ledger
from pipelines.workloads import prompts
from tests.pipelines.watch.records import WORKER


def sent(handler, count: int = 1) -> Traffic:
    """Traffic after so many requests to a worker that answers as ``handler`` does."""
    traffic = Traffic("http://worker", "model", Ledger(WORKER))
    traffic.stopping.set()  # waits for nothing
    traffic._next = prompts("chat")
    transport = httpx.MockTransport(handler)
    with httpx.Client(base_url="http://worker", transport=transport) as client:
        for _ in range(count):
            traffic.send(client)
    return traffic


def test_a_request_names_its_workload_and_decodes_greedily() -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json={"usage": {"completion_tokens": 12}})

    assert sent(handler).counts == {"answered": 1, "tokens": 12}
    ((path, asked),) = seen
    assert path == "/v1/chat/completions"
    assert asked["vllm_xargs"] == {"hvd_workload": "chat"}
    assert (asked["temperature"], asked["messages"]) == (0, list(next(prompts("chat")).messages))


@pytest.mark.parametrize(
    ("response", "word"),
    [
        (httpx.Response(500, text="engine died"), "engine died"),
        (httpx.Response(200, json={}), "usage"),
        (httpx.Response(200, text="<html>"), "JSON"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
    ],
)
def test_a_failed_request_is_counted_and_many_in_a_row_end_the_run(response, word: str) -> None:
    handler = Mock(side_effect=response if isinstance(response, Exception) else lambda _: response)
    few = sent(handler, FAILURES_ALLOWED)
    assert few.counts == {"failed": FAILURES_ALLOWED, "tokens": 0}
    few.check()
    with pytest.raises(ProcessError, match=word):
        sent(handler, FAILURES_ALLOWED + 1).check()


def test_phases_share_the_time_and_the_drafter_is_mended_on_the_text_it_was_broken_on() -> None:
    for seconds, count in ((420.0, 4), (60.0, 2)):
        lengths = [length for _, length in phases_for(seconds)]
        assert sum(lengths) == pytest.approx(seconds) and len(lengths) == count
    *_, sound, broken, mended = PLANS
    assert sound.workloads == broken.workloads == mended.workloads
    assert [plan.broken for plan in PLANS] == [False, False, True, False]


def test_an_unasked_length_shrinks_with_a_slow_start_and_an_asked_one_does_not() -> None:
    usual = [traffic_seconds(None, spent) for spent in (30.0, 300.0, 5000.0)]
    assert usual == [420.0, 240.0, 60.0] and traffic_seconds(15.0, spent=300.0) == 900.0
