"""Clients that keep asking, one request after another, and write down what they saw."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from pipelines.stack.running import PLAIN
from pipelines.workloads import Prompt

MAX_TOKENS = 24
WHOLE = ("length", "stop")
"""How an answer ends that is one: a server that goes down answers with ``abort`` and few tokens."""
AGAIN_S = 0.2
"""Before a request that was refused is sent again."""
UNREAD_S = 0.5
"""A connection lost so soon, without a byte of an answer, was taken by a port that closed and never
read: no server can close one otherwise."""


@dataclass(frozen=True)
class Seen:
    """One request: ``outcome`` is "answered" or "error"; ``refused`` counts how often nobody
    listened before, or a server that ends sent it away. Times by ``time.monotonic``.
    """

    prompt: int
    began: float
    ended: float
    outcome: str
    tokens: tuple[int, ...]
    refused: int
    what: str = ""


def answer_of(api: str, model: str, prompt: Prompt, streams: bool) -> tuple[int, ...]:
    """The answer's token ids.

    Raises:
        httpx.HTTPError: it was refused or cut, also by a server that says so in its answer.
        LookupError, TypeError, ValueError: what came is no answer, such as an error in a stream.
    """
    body = {
        "model": model,
        "messages": list(prompt.messages),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        "stream": streams,
    }
    with httpx.stream(
        "POST", f"{api}/v1/chat/completions", json=body, timeout=300.0, verify=PLAIN
    ) as response:
        response.raise_for_status()
        if not streams:
            (choice,) = json.loads(response.read())["choices"]
            return _whole(choice["token_ids"], choice["finish_reason"])
        tokens: list[int] = []
        ending = None
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return _whole(tokens, ending)
            if line:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or ()
                    ending = choice.get("finish_reason") or ending
        raise httpx.RemoteProtocolError(f"the stream ended after {len(tokens)} tokens")


def _whole(tokens: Sequence[int], ending: str | None) -> tuple[int, ...]:
    if ending not in WHOLE:
        raise httpx.RemoteProtocolError(f"the answer ended by {ending} after {len(tokens)} tokens")
    return tuple(tokens)


def _is_refusal(error: Exception, seconds: float) -> bool:
    """Whether nobody has begun with the request: it may be sent again."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == httpx.codes.SERVICE_UNAVAILABLE
    unread = isinstance(error, httpx.NetworkError) or "without sending" in str(error)
    return isinstance(error, httpx.ConnectError) or (unread and seconds < UNREAD_S)


@dataclass
class Client:
    """Asks ``prompts`` round and round, from the ``first``-th on, until it is told to stop."""

    ask: Callable[[Prompt], tuple[int, ...]]
    prompts: Sequence[Prompt]
    first: int
    seen: list[Seen] = field(default_factory=list)
    asking_since: float | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """To be run in a thread of its own."""
        try:
            for number in itertools.count(self.first):
                if self.stopping.is_set():
                    return
                self.seen.append(self._one(number % len(self.prompts)))
        finally:
            self.ended.set()

    def _one(self, number: int) -> Seen:
        refused, began = 0, time.monotonic()
        self.asking_since = time.monotonic()
        while True:
            sent = time.monotonic()
            try:
                tokens = self.ask(self.prompts[number])
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                if not _is_refusal(error, time.monotonic() - sent):
                    what = f"{type(error).__name__}: {error}"
                    return Seen(number, began, time.monotonic(), "error", (), refused, what)
                refused += 1
                self.asking_since = None
                if self.stopping.wait(AGAIN_S):
                    return Seen(number, began, time.monotonic(), "stopped", (), refused)
                self.asking_since = time.monotonic()
            else:
                return Seen(number, began, time.monotonic(), "answered", tokens, refused)
            finally:
                self.asking_since = None
