"""Requests to a running server: a fixed number under way at any time, each streamed and timed.

A prompt is one request; or a session of several, with empty messages of the assistant between them:
there the server's answer stands, and the next request waits for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx

from pipelines.prompts import Message, Prompt

REQUEST_SECONDS: Final = 600.0
"""Longest silence within one answer, of a server that runs."""


@dataclass(frozen=True)
class Reply:
    """The answer to a prompt or one of its turns; seconds count from sending. ``error``: why none.

    ``arrivals_s`` holds when each token came, from the beginning of the load.
    """

    prompt: str
    ttft_s: float
    latency_s: float
    tokens: tuple[int, ...]
    error: str = ""
    arrivals_s: tuple[float, ...] = ()
    turn: int = 0


@dataclass(frozen=True)
class Load:
    """What every request shares. ``silence_s`` is by the clock on the wall, all else by ``clock``,
    in seconds."""

    url: str
    model: str
    concurrency: int
    max_tokens: int
    clock: Callable[[], float] = time.perf_counter
    silence_s: float = REQUEST_SECONDS


def turns(prompt: Prompt) -> list[tuple[Message, ...]]:
    """What is said before each answer: the messages between the empty ones of the assistant."""
    found: list[list[Message]] = [[]]
    for message in prompt.messages:
        if message["role"] != "assistant" or message["content"]:
            found[-1].append(message)
        elif found[-1]:
            found.append([])
    return [tuple(said) for said in found if said]


def body(messages: Sequence[Message], model: str, max_tokens: int) -> dict[str, Any]:
    """The request for an answer to ``messages``: greedy, streamed, with token ids."""
    shared = {"temperature": 0, "stream": True, "return_token_ids": True}
    return {"model": model, "messages": list(messages), "max_tokens": max_tokens, **shared}


def chunks(lines: Iterator[str]) -> Iterator[tuple[list[int], str]]:
    """Token ids and text of each event of a streamed chat completion that carries any.

    Raises:
        ValueError: the server reported an error within the stream, or sent something else.
    """
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(str(event["error"])[:200])
        for choice in event["choices"]:
            ids, text = choice.get("token_ids"), choice.get("delta", {}).get("content")
            if ids or text:
                yield ids or [], text or ""


def answers(client: httpx.Client, load: Load, prompt: Prompt, began: float) -> Iterator[Reply]:
    """One reply, or one for each turn up to the first that fails."""
    said: list[Message] = []
    for turn, news in enumerate(turns(prompt)):
        said += news
        tokens, arrivals, text, error = list[int](), list[float](), "", None
        sent = load.clock()
        request = body(said, load.model, load.max_tokens)
        try:
            with client.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.is_success:
                    for ids, more in chunks(response.iter_lines()):
                        arrivals += [load.clock()] * len(ids)
                        tokens += ids
                        text += more
                else:
                    error = f"HTTP {response.status_code}: {response.read().decode()[:300]}"
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is None and not tokens:
            error = "the answer held no token"
        now, came = load.clock(), tuple(at - began for at in arrivals)
        times = (arrivals or [now])[0] - sent, now - sent
        yield Reply(f"{prompt.dataset}:{prompt.id}", *times, tuple(tokens), error or "", came, turn)
        if error:
            return
        said.append({"role": "assistant", "content": text})


def run(
    load: Load, prompts: Sequence[Prompt], done: Callable[[], object] = lambda: None
) -> tuple[float, list[Reply]]:
    """Send ``prompts`` in order, so many of them at a time as the load says.

    Args:
        done: called after each reply, from several threads, one call at a time.

    Returns:
        seconds from the first request to the end of the last answer, and the replies in the order
        of ``prompts`` and of their turns.
    """
    lock, leaving = threading.Lock(), threading.Event()
    # one for all: making another takes as long as a step
    limits = httpx.Limits(max_connections=load.concurrency)
    client = httpx.Client(base_url=load.url, timeout=load.silence_s, limits=limits)
    began = load.clock()

    def session(prompt: Prompt) -> list[Reply]:
        replies: list[Reply] = []
        for reply in answers(client, load, prompt, began):
            replies.append(reply)
            with lock:
                done()
            if leaving.is_set():
                break
        return replies

    pool = ThreadPoolExecutor(load.concurrency)
    try:
        found = list(pool.map(session, prompts))
    finally:
        leaving.set()
        # Ctrl-C must not wait for answers: whoever interrupts stops the server, which ends them
        pool.shutdown(wait=False, cancel_futures=True)
        client.close()
    return load.clock() - began, [reply for replies in found for reply in replies]
