"""Clients that keep asking, one request after another, and write down what they saw."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from pipelines.workloads import Prompt

MAX_TOKENS = 24
AGAIN_S = 0.2
"""Before a request that was refused is sent again."""


@dataclass(frozen=True)
class Seen:
    """One request: ``outcome`` is "answered" or "error"; ``refused`` counts how often nobody
    listened before. Times by ``time.monotonic``.
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
        httpx.HTTPError: it was refused or cut.
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
    with httpx.stream("POST", f"{api}/v1/chat/completions", json=body, timeout=300.0) as response:
        response.raise_for_status()
        if not streams:
            return tuple(json.loads(response.read())["choices"][0]["token_ids"])
        tokens: list[int] = []
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return tuple(tokens)
            if line:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or ()
        raise httpx.RemoteProtocolError(f"the stream ended after {len(tokens)} tokens")


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
            try:
                tokens = self.ask(self.prompts[number])
            except httpx.ConnectError:
                refused += 1
                self.asking_since = None
                if self.stopping.wait(AGAIN_S):
                    return Seen(number, began, time.monotonic(), "stopped", (), refused)
                self.asking_since = time.monotonic()
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                return Seen(number, began, time.monotonic(), "error", (), refused, what)
            else:
                return Seen(number, began, time.monotonic(), "answered", tokens, refused)
            finally:
                self.asking_since = None
