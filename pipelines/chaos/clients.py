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

from pipelines.bench.serve.load import Load, Reply, answer
from pipelines.stack.running import PLAIN
from pipelines.workloads import Prompt

CLIENTS: Final = 3
MAX_TOKENS: Final = 24
SILENCE_S: Final = 300.0
AGAIN_S: Final = 0.2  # before a request that was refused is sent again
UNREAD_S: Final = 0.5
"""A connection lost so soon, without a byte of an answer, was taken by a port that closed and never
read: no server can close one otherwise."""


@dataclass(frozen=True)
class Seen:
    """The answer to a request, ``refused`` so often before; times by ``time.monotonic``."""

    prompt: int
    began: float
    ended: float
    refused: int
    tokens: tuple[int, ...]
    error: str


def answer_of(api: str, model: str, prompt: Prompt) -> Reply:
    """The answer to ``prompt``, or why there is none."""
    load = Load(model, MAX_TOKENS, time.monotonic, 0.0)
    with httpx.Client(base_url=api, timeout=SILENCE_S, verify=PLAIN) as connection:
        return answer(connection, load, prompt.id, prompt.messages)[0]


def _is_refusal(reply: Reply) -> bool:
    """Nobody has begun with the request: nobody listened, or a server that ends sent it away."""
    unread = reply.error.startswith(("ReadError", "WriteError")) or "without send" in reply.error
    sent_away = reply.error.startswith(("ConnectError", "HTTP 503"))
    return sent_away or (unread and not reply.tokens and reply.latency_s < UNREAD_S)


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
            now = time.monotonic()
            seen.append(Seen(place, began, now, refused, reply.tokens, reply.error))
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
