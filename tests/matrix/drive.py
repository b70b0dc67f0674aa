"""Sends the asks to a running server, several at a time, and keeps what came back."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.matrix.asks import Ask

REQUEST_S = 300.0


@dataclass(frozen=True)
class Choice:
    """One answer; ``logprobs`` is the server's own record, or None."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: Any = None


@dataclass(frozen=True)
class Reply:
    """What a request got. ``status`` 0: the connection broke, ``error`` says how."""

    status: int
    choices: list[Choice] = field(default_factory=list)
    error: str = ""


def send_all(url: str, asks: Sequence[Ask], together: int) -> dict[str, Reply]:
    """Replies by the names of the asks, ``together`` of which are under way at any time."""
    limits = httpx.Limits(max_connections=together)
    with (
        httpx.Client(base_url=url, timeout=REQUEST_S, limits=limits) as client,
        ThreadPoolExecutor(together) as pool,
    ):
        replies = pool.map(lambda ask: send(client, ask), asks)
        return {ask.name: reply for ask, reply in zip(asks, replies, strict=True)}


def send(client: httpx.Client, ask: Ask) -> Reply:
    """Ask once; whatever goes wrong is in the reply."""
    try:
        if ask.body.get("stream"):
            return _streamed(client, ask)
        response = client.post(ask.path, json=ask.body, headers=ask.headers)
        if not response.is_success:
            return Reply(response.status_code, error=response.text[:500])
        return Reply(response.status_code, [_choice(c) for c in response.json()["choices"]])
    except httpx.HTTPError as error:
        return Reply(0, error=f"{type(error).__name__}: {error}")


def _choice(choice: dict[str, Any]) -> Choice:
    message = choice.get("message") or {"content": choice.get("text")}
    return Choice(
        list(choice.get("token_ids") or ()),
        choice["finish_reason"] or "",
        message.get("content") or "",
        [call["function"] for call in message.get("tool_calls") or ()],
        choice.get("logprobs"),
    )


def _streamed(client: httpx.Client, ask: Ask) -> Reply:
    tokens, text, finish = defaultdict[int, list[int]](list), "", ""
    calls = defaultdict[int, dict[str, str]](lambda: {"name": "", "arguments": ""})
    with client.stream("POST", ask.path, json=ask.body, headers=ask.headers) as response:
        if not response.is_success:
            return Reply(response.status_code, error=response.read().decode()[:500])
        pieces = 0
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                return Reply(500, error=str(event["error"])[:500])
            for choice in event["choices"]:
                tokens[choice["index"]] += choice.get("token_ids") or ()
                text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
                for piece in choice["delta"].get("tool_calls") or ():
                    for part, said in (piece.get("function") or {}).items():
                        calls[piece["index"]][part] += said or ""
            pieces += 1
            if pieces == ask.leaves_after:
                break
        return Reply(response.status_code, [Choice(tokens[0], finish, text, list(calls.values()))])
