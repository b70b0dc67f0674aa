"""Clients that keep asking, one request after another, and write down what they saw."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import httpx

from pipelines.lab.bench.serve.load import body, chunks
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
    """The answer to a request, or why it ended early; times by ``time.monotonic``."""

    began: float
    ended: float
    tokens: tuple[int, ...]
    error: str
    prompt: int = 0
    refused: int = 0  # times that it was sent again


def answer_of(api: str, model: str, prompt: Prompt) -> Seen:
    """The answer to ``prompt``; never raises."""
    url, asked = f"{api}/v1/chat/completions", body(prompt.messages, model, MAX_TOKENS)
    began, tokens, error = time.monotonic(), list[int](), ""
    try:
        with httpx.stream("POST", url, json=asked, timeout=SILENCE_S, verify=PLAIN) as response:
            response.raise_for_status()
            for ids, _ in chunks(response.iter_lines()):
                tokens += ids
    except Exception as failure:  # noqa: BLE001 -- whatever came, the next one is asked
        error = f"{type(failure).__name__}: {failure}"
    return Seen(began, time.monotonic(), tuple(tokens), error)


def _is_refusal(seen: Seen) -> bool:
    """Nobody has begun with the request: nobody listened, or a server that ends sent it away."""
    if seen.error.startswith("ConnectError") or "'503 " in seen.error:
        return True
    unread = seen.error.startswith(("ReadError", "WriteError")) or "without send" in seen.error
    return unread and not seen.tokens and seen.ended - seen.began < UNREAD_S


@contextmanager
def asking(api: str, model: str, prompts: Sequence[Prompt]) -> Iterator[list[list[Seen]]]:
    """Clients ask ``prompts`` round and round while the block lasts: what each has seen."""
    found: list[list[Seen]] = [[] for _ in range(CLIENTS)]
    stopping = threading.Event()

    def run(first: int, seen: list[Seen]) -> None:
        for number in itertools.count(first):
            place, began, refused = number % len(prompts), time.monotonic(), 0
            while _is_refusal(answer := answer_of(api, model, prompts[place])):
                refused += 1
                if stopping.wait(AGAIN_S):
                    return
            seen.append(replace(answer, began=began, prompt=place, refused=refused))
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
