"""Requests to a running server: a fixed number under way at any time, each streamed and timed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import httpx

from pipelines.bench.prompts import Prompt

REQUEST_SECONDS: Final = 600.0
"""Longest silence within one answer."""


@dataclass(frozen=True)
class Reply:
    """The answer to one prompt; seconds count from sending. Failed: ``error`` says why.

    ``arrivals_s`` holds when each token came, ``ended_s`` when the answer was over; both count from
    the beginning of the load.
    """

    prompt: str
    ttft_s: float
    latency_s: float
    tokens: tuple[int, ...]
    error: str = ""
    arrivals_s: tuple[float, ...] = ()
    ended_s: float = 0.0


def name_of(prompt: Prompt) -> str:
    """A name that no prompt of another dataset has."""
    return f"{prompt.dataset}:{prompt.id}"


def body(prompt: Prompt, model: str, max_tokens: int) -> dict[str, Any]:
    """The request for ``prompt``: greedy, streamed, with token ids."""
    return {
        "model": model,
        "messages": list(prompt.messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
    }


def token_chunks(lines: Iterator[str]) -> Iterator[list[int]]:
    """Token ids of each event of a streamed chat completion that carries any.

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
            if ids := choice.get("token_ids"):
                yield ids


def send(
    client: httpx.Client, prompt: Prompt, model: str, max_tokens: int, load_began: float
) -> Reply:
    """Send one prompt and read its answer to the end; a failure becomes a reply with ``error``.

    Args:
        load_began: by the performance counter.
    """
    tokens: list[int] = []
    arrivals: list[float] = []
    began = time.perf_counter()
    error = None
    try:
        with client.stream(
            "POST", "/v1/chat/completions", json=body(prompt, model, max_tokens)
        ) as response:
            if response.is_success:
                for ids in token_chunks(response.iter_lines()):
                    arrivals += [time.perf_counter() - load_began] * len(ids)
                    tokens += ids
            else:
                error = f"HTTP {response.status_code}: {response.read().decode()[:300]}"
    except (httpx.HTTPError, ValueError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and not tokens:
        error = "the answer held no token"
    now = time.perf_counter()
    first = arrivals[0] + load_began if arrivals else now
    return Reply(
        name_of(prompt), first - began, now - began, tuple(tokens), error or "", tuple(arrivals),
        now - load_began,
    )  # fmt: skip


def run(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    concurrency: int,
    max_tokens: int,
    done: Callable[[], object] = lambda: None,
) -> tuple[float, list[Reply]]:
    """Send ``prompts`` in order, ``concurrency`` of them at a time.

    Args:
        done: called after each reply, from several threads, one call at a time.

    Returns:
        seconds from the first request to the end of the last answer, and the replies in the order
        of ``prompts``.
    """
    began = time.perf_counter()
    replies: list[Reply | None] = [None] * len(prompts)
    queue, lock, leaving = iter(enumerate(prompts)), threading.Lock(), threading.Event()

    def work() -> None:
        with httpx.Client(base_url=url, timeout=REQUEST_SECONDS) as client:
            while not leaving.is_set():
                with lock:
                    index, prompt = next(queue, (0, None))
                if prompt is None:
                    return
                reply = send(client, prompt, model, max_tokens, began)
                with lock:
                    replies[index] = reply
                    done()

    pool = ThreadPoolExecutor(concurrency)
    running: list[Future[None]] = [pool.submit(work) for _ in range(concurrency)]
    try:
        wait(running, return_when=FIRST_EXCEPTION)
    finally:
        leaving.set()
        # Ctrl-C must not wait for answers: whoever interrupts stops the server, which ends them
        pool.shutdown(wait=False)
    for worker in running:
        worker.result()
    return time.perf_counter() - began, [r for r in replies if r is not None]
