"""Answers are put together and compared, so that a difference a client could see is found."""

from __future__ import annotations

import copy
from typing import Any

from openai.types.chat import ChatCompletionChunk

from tests.matrix.asks import Ask
from tests.stock_client.answers import differences, gathered
from tests.stock_client.asks import all_asks
from tests.stock_client.served import faults


def chunk(delta: dict[str, Any] | None, **further: Any) -> ChatCompletionChunk:
    of_choice = {k: further.pop(k) for k in ("index", "finish_reason", "logprobs") if k in further}
    choices = [{"index": 0, "delta": delta, "finish_reason": None, **of_choice}]
    told = {"id": "a", "created": 1, "model": "m", "object": "chat.completion.chunk"}
    return ChatCompletionChunk.model_validate(
        {**told, "choices": choices if delta is not None else [], **further}
    )


def call(**function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": function}]}


def entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_pieces_are_put_together_by_choice_and_call_wherever_they_were_cut() -> None:
    pieces = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "a"}, index=1, logprobs={"content": [entry("a", -0.5)]}),
        chunk(call(name="read", arguments="")),
        chunk(call(arguments='{"x":')),
        chunk({"content": "bc"}, index=1, logprobs={"content": [entry("bc", -0.1)]}),
        chunk(call(arguments=" 1}"), finish_reason="tool_calls"),
        chunk({}, index=1, finish_reason="stop"),
        chunk(None, usage=USAGE),
    ]
    found = gathered(pieces)
    first, second = found["choices"]
    assert first["calls"] == {"0": {"name": "read", "arguments": '{"x": 1}'}}
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert second["text"] == "abc"
    assert [e["logprob"] for e in second["logprobs"]["content"]] == [-0.5, -0.1]
    assert found["usage"]["completion_tokens"] == 2
    joined = [*pieces[:3], chunk(call(arguments='{"x": 1}'), finish_reason="tool_calls")]
    joined += [pieces[4], *pieces[6:]]
    assert list(differences(gathered(joined), found)) == []


def test_every_change_a_client_could_see_is_told() -> None:
    told = {
        "choices": [{"text": "ab", "finish_reason": "stop", "logprobs": [-0.5, None]}],
        "usage": {"completion_tokens": 2},
    }
    changes: list[tuple[tuple[str | int, ...], Any]] = [
        (("choices", 0, "text"), "ac"),
        (("choices", 0, "finish_reason"), "length"),
        (("choices", 0, "logprobs", 0), -0.5002),
        (("choices", 0, "logprobs"), [-0.5]),
        (("choices",), told["choices"] * 2),
        (("usage", "completion_tokens"), 3),
        (("usage",), None),
        (("further",), 1),
    ]
    exact, drawn = (Ask("one-0", {}, exact=exact) for exact in (True, False))
    for path, value in changes:
        changed: Any = copy.deepcopy(told)
        at = changed
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value
        assert len(faults(exact, changed, told)) == 1, path
        shows = path[0] == "usage" or path in {("choices",), ("choices", 0, "finish_reason")}
        assert len(faults(drawn, changed, told)) == shows, path
    near = copy.deepcopy(told)
    near["choices"][0]["logprobs"][0] = -0.50005
    assert faults(exact, near, told) == []


def test_asks_have_names_of_their_own_and_what_is_drawn_may_not_end_early() -> None:
    asks = all_asks()
    assert len({ask.name for ask in asks}) == len(asks) > 120
    for ask in asks:
        assert ask.exact or ask.body["ignore_eos"], ask.name
        assert "return_token_ids" not in ask.body
        quiet = ask.body.get("vllm_xargs", {}).get("hvd_speculate") == "off"
        assert "seed" not in ask.body or ask.exact is quiet, ask.name
