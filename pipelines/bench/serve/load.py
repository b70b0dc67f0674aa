"""Requests to a running server: a fixed number under way at any time, each streamed and timed.

A prompt is one request; or, by turns, a session of several: what the server answers stands in the
next one, and the next one waits for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import httpx

from pipelines.prompts import Message, Prompt

REQUEST_SECONDS: Final = 600.0
"""Longest silence within one answer, of a server that runs."""


@dataclass(frozen=True)
class Reply:
    """The answer to a prompt or one of its turns; seconds count from sending. ``error``: why none.

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
    turn: int = 0


def name_of(prompt: Prompt) -> str:
    """A name that no prompt of another dataset has."""
    return f"{prompt.dataset}:{prompt.id}"


def turns(prompt: Prompt) -> list[tuple[Message, ...]]:
    """What is said before each answer: the messages between those of the assistant."""
    found: list[list[Message]] = [[]]
    for message in prompt.messages:
        if message["role"] != "assistant":
            found[-1].append(message)
        elif found[-1]:
            found.append([])
    return [tuple(said) for said in found if said]


def body(messages: Sequence[Message], model: str, max_tokens: int) -> dict[str, Any]:
    """The request for an answer to ``messages``: greedy, streamed, with token ids."""
    return {
        "model": model,
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
    }


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


@dataclass(frozen=True)
class Load:
    """What every request of a load shares; ``began`` is by its ``clock``, in seconds."""

    model: str
    max_tokens: int
    clock: Callable[[], float]
    began: float


def answer(
    client: httpx.Client, load: Load, prompt: str, messages: Sequence[Message], turn: int = 0
) -> tuple[Reply, str]:
    """Ask for one answer and read it to the end: the reply and its text.

    A failure becomes a reply with ``error``.
    """
    tokens: list[int] = []
    arrivals: list[float] = []
    text = ""
    began = load.clock()
    error = None
    asked = body(messages, load.model, load.max_tokens)
    try:
        with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            if response.is_success:
                for ids, more in chunks(response.iter_lines()):
                    arrivals += [load.clock() - load.began] * len(ids)
                    tokens += ids
                    text += more
            else:
                error = f"HTTP {response.status_code}: {response.read().decode()[:300]}"
    except (httpx.HTTPError, ValueError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and not tokens:
        error = "the answer held no token"
    now = load.clock()
    first = arrivals[0] + load.began if arrivals else now
    reply = Reply(
        prompt, first - began, now - began, tuple(tokens), error or "", tuple(arrivals),
        now - load.began, turn,
    )  # fmt: skip
    return reply, text


def answers(client: httpx.Client, load: Load, prompt: Prompt, by_turns: bool) -> Iterator[Reply]:
    """One reply, or one for each turn up to the first that fails."""
    said: list[Message] = []
    for turn, heard in enumerate(turns(prompt) if by_turns else [prompt.messages]):
        said += heard
        reply, text = answer(client, load, name_of(prompt), said, turn)
        yield reply
        if reply.error:
            return
        said.append({"role": "assistant", "content": text})


def run(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    concurrency: int,
    max_tokens: int,
    done: Callable[[], object] = lambda: None,
    by_turns: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    silence_s: float = REQUEST_SECONDS,
) -> tuple[float, list[Reply]]:
    """Send ``prompts`` in order, ``concurrency`` of them at a time.

    Args:
        done: called after each reply, from several threads, one call at a time.
        by_turns: a prompt is a session; what its assistant says is written anew by the server.
        clock: seconds, by which everything is timed.
        silence_s: longest silence within one answer, by the clock on the wall.

    Returns:
        seconds from the first request to the end of the last answer, and the replies in the order
        of ``prompts`` and of their turns.
    """
    replies: list[list[Reply]] = [[] for _ in prompts]
    queue, lock, leaving = iter(enumerate(prompts)), threading.Lock(), threading.Event()

    # one for all: making another takes as long as a step
    client = httpx.Client(
        base_url=url, timeout=silence_s, limits=httpx.Limits(max_connections=concurrency)
    )

    def work() -> None:
        while not leaving.is_set():
            with lock:
                index, prompt = next(queue, (0, None))
            if prompt is None:
                return
            for reply in answers(client, load, prompt, by_turns):
                with lock:
                    replies[index].append(reply)
                    done()
                if leaving.is_set():
                    return

    load = Load(model, max_tokens, clock, clock())
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
    client.close()
    return clock() - load.began, [r for session in replies for r in session]
