"""What a client makes of answers that are none."""

from __future__ import annotations

import json

import pytest

from pipelines.chaos.clients import Client
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
