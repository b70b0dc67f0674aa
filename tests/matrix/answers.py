"""What a running server answers to OpenAI's own client, several requests at a time; and where two
answers differ."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import openai
from openai import OpenAI

from tests.matrix.asks import CHAT, Ask

PATIENCE_S: Final = 600.0

Answer = dict[str, Any]


def client_of(url: str) -> OpenAI:
    """A client as it comes, but that it does not ask again: a failure must be seen."""
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def answer(client: OpenAI, ask: Ask) -> Answer:
    """What the client returns; or the status under which it was ``refused``, and what was said.

    Raises:
        openai.APIConnectionError: nobody answered.
    """
    create = client.chat.completions.create if ask.path == CHAT else client.completions.create
    standard = inspect.signature(create).parameters
    known = {k: v for k, v in ask.body.items() if k in standard}
    other = {k: v for k, v in ask.body.items() if k not in standard}
    try:
        got = create(**known, extra_body=other, extra_headers=ask.headers)
        if not ask.body.get("stream"):
            return told(got)
        with got:
            return gathered(itertools.islice(got, ask.leaves_after))
    except openai.APIConnectionError:
        raise
    except openai.APIError as error:  # without a status where it came in a stream
        return {"refused": getattr(error, "status_code", 0), "message": error.message}


def told(response: Any) -> Answer:
    """A whole answer, but for what is its own: id, time, and the ids of its tool calls; and for the
    digest that names the server's configuration, which is another one."""
    own = {"id", "created", "system_fingerprint"}
    found: Answer = response.model_dump(mode="json", exclude=own)
    for choice in found["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    return found


def gathered(chunks: Iterable[Any]) -> Answer:
    """An answer in pieces, put together; where it was cut into them is nobody's business."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage.model_dump(mode="json") if chunk.usage else usage
        for piece in chunk.choices:
            choice = choices.setdefault(
                piece.index,
                {"text": "", "finish_reason": None, "calls": {}, "logprobs": {}, "token_ids": []},
            )
            choice["token_ids"] += getattr(piece, "token_ids", None) or ()
            choice["finish_reason"] = piece.finish_reason or choice["finish_reason"]
            logprobs = piece.logprobs.model_dump(mode="json") if piece.logprobs else {}
            for name, entries in logprobs.items():
                choice["logprobs"].setdefault(name, []).extend(entries or ())
            if not hasattr(piece, "delta"):
                choice["text"] += piece.text
                continue
            choice["text"] += piece.delta.content or ""
            for call in piece.delta.tool_calls or ():
                made = choice["calls"].setdefault(str(call.index), {"name": "", "arguments": ""})
                made["name"] += call.function.name or ""
                made["arguments"] += call.function.arguments or ""
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


def answers_of(url: str, asks: Sequence[Ask], together: int) -> dict[str, Answer]:
    """Answers by the names of the asks, ``together`` of which are under way at any time."""
    with client_of(url) as client, ThreadPoolExecutor(together) as pool:
        found = list(pool.map(lambda ask: answer(client, ask), asks))
    return {ask.name: got for ask, got in zip(asks, found, strict=True)}


def differences(got: Any, expected: Any, at: str = "", close: float = 1e-4) -> Iterator[str]:
    """A sentence for each place where two answers differ, numbers by more than
    ``close``: batches of other shapes add up in another order."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for name in sorted(got.keys() | expected.keys()):
            yield from differences(got.get(name), expected.get(name), f"{at}.{name}", close)
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            yield from differences(one, other, f"{at}[{index}]", close)
    elif isinstance(got, float) and isinstance(expected, float):
        if not abs(got - expected) <= close:
            yield f"{at}: {got} instead of {expected}"
    elif got != expected:
        yield f"{at}: {got!r} instead of {expected!r}"
