"""Answers are put together and compared, so that a difference a client could see is found."""

from __future__ import annotations

import copy
from typing import Any

from tests.matrix.asks import Ask
from tests.stock_client.served import faults


def test_every_change_a_client_could_see_is_told() -> None:
    told = {
        "choices": [{"text": "ab", "finish_reason": "stop", "logprobs": [-0.5, None]}],
        "usage": {"completion_tokens": 2},
    }
    changes: list[tuple[tuple[str | int, ...], Any]] = [
        (("choices", 0, "text"), "ac"), (("choices", 0, "finish_reason"), "length"),
        (("choices", 0, "logprobs", 0), -0.5002), (("choices", 0, "logprobs"), [-0.5]),
        (("choices",), told["choices"] * 2), (("usage", "completion_tokens"), 3),
        (("usage",), None), (("further",), 1),
    ]  # fmt: skip
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
