"""Clients that keep asking, one request after another, and write down what they saw."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx

from pipelines.lab.bench.serve.load import Load, Reply, answers
from pipelines.prompts import Prompt
from pipelines.stack.running import PLAIN

CLIENTS: Final = 3
MAX_TOKENS: Final = 24
SILENCE_S: Final = 300.0
AGAIN_S: Final = 0.2  # before a request that was refused is sent again
UNREAD_S: Final = 0.5
"""A connection lost so soon, without a byte of an answer, was taken by a port that closed and never
read: no server can close one otherwise."""


@dataclass(frozen=True)
class Seen:
    """The answer to a request, or why it ended early; times by ``time.monotonic``."""

    began: float
    ended: float
    tokens: tuple[int, ...]
    error: str
    prompt: int = 0
    refused: int = 0  # times that it was sent again


def answer_of(api: str, model: str, prompt: Prompt) -> Reply:
    """The answer to ``prompt``, by a connection of its own."""
    load = Load(api, model, 1, MAX_TOKENS)
    with httpx.Client(base_url=api, timeout=SILENCE_S, verify=PLAIN) as client:
        return next(answers(client, load, prompt, 0.0))


def _is_refusal(reply: Reply) -> bool:
    """Nobody has begun with the request: nobody listened, or a server that ends sent it away."""
    if reply.error.startswith(("ConnectError", "HTTP 503")):
        return True
    unread = reply.error.startswith(("ReadError", "WriteError")) or "without send" in reply.error
    return unread and not reply.tokens and reply.latency_s < UNREAD_S


@contextmanager
def asking(api: str, model: str, prompts: Sequence[Prompt]) -> Iterator[list[list[Seen]]]:
    """Clients ask ``prompts`` round and round while the block lasts: what each has seen."""
    found: list[list[Seen]] = [[] for _ in range(CLIENTS)]
    stopping = threading.Event()

    def run(first: int, seen: list[Seen]) -> None:
        for number in itertools.count(first):
            place, began, refused = number % len(prompts), time.monotonic(), 0
            while _is_refusal(reply := answer_of(api, model, prompts[place])):
                refused += 1
                if stopping.wait(AGAIN_S):
                    return
            ended = time.monotonic()
            seen.append(Seen(began, ended, reply.tokens, reply.error, place, refused))
            if stopping.is_set():
                return

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(found)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stopping.set()
        for thread in threads:
            thread.join(SILENCE_S)
