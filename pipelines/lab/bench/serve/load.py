"""The load of ``hvd bench serve``: a fixed number of concurrent requests, streamed and timed.

A prompt is one request, or a session of several, separated by empty assistant messages. The
server's answer takes their place before the next request is sent.

A server's prefix cache and suffix caches remember earlier requests. A prompt sent again at the next
concurrency would draft from its own earlier answer. So each concurrency gets its own prompts, from
the same datasets in the same proportions.

A machine's speed varies within half a minute by more than what is compared. So servers that run
together get their requests at once, and all but one are stopped (SIGSTOP). Each server's clock runs
only while it does. The server with the fewest answers runs next. Other load on the machine then
affects all servers alike.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import httpx

from decoder.contracts.errors import SettingsError
from pipelines import workloads
from pipelines.prompts import Message, Prompt, PromptSet, fitting, read_folder

REQUEST_SECONDS: Final = 600.0  # read timeout of an answer while its server runs


@dataclass(frozen=True)
class Reply:
    """The answer to a prompt or one of its turns. Times are seconds from sending, and between
    chunks. ``error`` says why there is no answer."""

    prompt: str
    ttft_s: float
    latency_s: float
    tokens: tuple[int, ...]
    error: str = ""
    turn: int = 0
    gaps_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Load:
    """What all requests share. ``silence_s`` is a read timeout by the wall clock; all other times
    are by ``clock``, in seconds."""

    url: str
    model: str
    concurrency: int
    max_tokens: int
    clock: Callable[[], float] = time.perf_counter
    silence_s: float = REQUEST_SECONDS


def turns(prompt: Prompt) -> list[tuple[Message, ...]]:
    """The messages before each answer, as separated by empty assistant messages."""
    parts: list[list[Message]] = [[]]
    for message in prompt.messages:
        if message["role"] != "assistant" or message["content"]:
            parts[-1].append(message)
        elif parts[-1]:
            parts.append([])
    return [tuple(part) for part in parts if part]


def body(messages: Sequence[Message], model: str, max_tokens: int) -> dict[str, Any]:
    """A greedy, streamed chat completion request that asks for token ids."""
    shared = {"temperature": 0, "stream": True, "return_token_ids": True}
    return {"model": model, "messages": list(messages), "max_tokens": max_tokens, **shared}


def chunks(lines: Iterator[str]) -> Iterator[tuple[list[int], str]]:
    """Token ids and text of each event of a streamed chat completion that has any.

    Raises:
        ValueError: the server reported an error, or sent something else.
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


def answers(client: httpx.Client, load: Load, prompt: Prompt) -> Iterator[Reply]:
    """The reply to each turn, up to the first that fails."""
    messages: list[Message] = []
    for turn, turn_messages in enumerate(turns(prompt)):
        messages += turn_messages
        tokens, arrivals, text, error = list[int](), list[float](), "", None
        sent = load.clock()
        request = body(messages, load.model, load.max_tokens)
        try:
            with client.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.is_success:
                    for ids, more in chunks(response.iter_lines()):
                        arrivals.append(load.clock())
                        tokens += ids
                        text += more
                else:
                    error = f"HTTP {response.status_code}: {response.read().decode()[:300]}"
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is None and not tokens:
            error = "the answer held no token"
        now = load.clock()
        times = (arrivals[0] if arrivals else now) - sent, now - sent
        gaps = tuple(later - earlier for earlier, later in itertools.pairwise(arrivals))
        yield Reply(f"{prompt.dataset}:{prompt.id}", *times, tuple(tokens), error or "", turn, gaps)
        if error:
            return
        messages.append({"role": "assistant", "content": text})


def run(
    load: Load, prompts: Sequence[Prompt], done: Callable[[], object] = lambda: None
) -> tuple[float, list[Reply]]:
    """Send ``prompts`` in order, at the load's concurrency.

    Args:
        done: called after each reply, from several threads, one call at a time.

    Returns:
        seconds from the first request to the end of the last answer, and the replies in the order
            of ``prompts`` and their turns.
    """
    lock, leaving = threading.Lock(), threading.Event()
    # one for all, since making one takes as long as a step
    limits = httpx.Limits(max_connections=load.concurrency)
    client = httpx.Client(base_url=load.url, timeout=load.silence_s, limits=limits, trust_env=False)
    began = load.clock()

    def session(prompt: Prompt) -> list[Reply]:
        replies: list[Reply] = []
        for reply in answers(client, load, prompt):
            replies.append(reply)
            with lock:
                done()
            if leaving.is_set():
                break
        return replies

    pool = ThreadPoolExecutor(load.concurrency)
    try:
        replies_by_prompt = list(pool.map(session, prompts))
    finally:
        leaving.set()
        # Ctrl-C must not wait for answers; stopping the server ends them
        pool.shutdown(wait=False, cancel_futures=True)
        client.close()
    return load.clock() - began, [reply for replies in replies_by_prompt for reply in replies]


FURTHER: Final = (
    "Result of run_tests: 1 failed. Correct what you wrote last and return the whole of it.",
    "Result of run_tests: 3 passed. Explain what you wrote last, line by line. Quote each line.",
    "Compare all that you were shown so far in a list, with quotes.",
)
"""Every other turn of the project's sessions: a request about the previous answer."""
ANSWER: Final = {"role": "assistant", "content": ""}  # marks the place of the server's answer


@dataclass(frozen=True)
class Selection:
    """Which prompts to send. ``budget`` is the most tokens of one; ``turns`` is 0 for single
    requests."""

    folder: Path | None
    concurrency: Sequence[int]
    limit: int
    budget: int
    turns: int


def from_workloads(
    count: int, names: Sequence[str] = workloads.WORKLOADS, most: int = 0
) -> list[PromptSet]:
    """``count`` held-out prompts of each of the project's workloads.

    With ``most`` they are sessions of that many turns, as an agent platform sends: every other turn
    brings another file, tool list or page, and the next asks about the previous answer.
    """
    sets = []
    for name in names:
        stream, further = workloads.prompts(name), itertools.cycle(FURTHER)
        prompts = []
        for index in range(count):
            script = [
                [{"role": "user", "content": next(further)}] if turn % 2 else next(stream).messages
                for turn in range(max(most, 1))
            ]
            prompts.append(Prompt(f"{name}-{index}", name, name, _scripted(script)))
        sets.append(PromptSet(name, name, tuple(prompts)))
    return sets


def cut(prompts: PromptSet, most: int) -> PromptSet:
    """Conversations as sessions of at most ``most`` turns. Their recorded answers are dropped;
    conversations without a question are left out."""
    kept = []
    for prompt in prompts.prompts:
        script = (ANSWER if m["role"] == "assistant" else m for m in prompt.messages)
        if script_turns := turns(replace(prompt, messages=tuple(script)))[:most]:
            kept.append(replace(prompt, messages=_scripted(script_turns)))
    return replace(prompts, prompts=tuple(kept))


def _scripted(script: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    return tuple(m for turn in script for m in (*turn, ANSWER))[:-1]


def levels(
    wanted: Selection, model: str, problems: list[str]
) -> tuple[tuple[int, tuple[Prompt, ...]], ...]:
    """Each concurrency with its prompts. Prompts that are left out become sentences in
    ``problems``.

    Raises:
        SettingsError: there are too few prompts.
    """
    from transformers import AutoTokenizer

    # with fewer than two each, the last sessions would run alone for long
    least = 2 * max(wanted.concurrency) if wanted.turns else 1
    count, concurrencies = max(wanted.limit, least), len(wanted.concurrency)
    if wanted.folder is not None:
        sets = list(read_folder(wanted.folder, (), problems))
        sets = [cut(s, wanted.turns) for s in sets] if wanted.turns else sets
    else:
        sets = from_workloads(count * concurrencies, most=wanted.turns)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def fits(each_set: PromptSet) -> Iterator[Prompt]:
        usable = fitting(each_set, tokenizer, wanted.budget, "skip", problems.append)
        return (one.prompt for one in usable)

    dealt = deal([fits(each_set) for each_set in sets], concurrencies, count)
    each = len(dealt[0]) if dealt else 0
    if each < least:
        raise SettingsError(
            f"{each} prompts for each concurrency are too few: it takes one, and two sessions for "
            f"each concurrent one. {' '.join(problems[:3])}"
        )
    if each < count:
        problems.append(f"only {each} of {count} prompts for each concurrency.")
    return tuple(zip(wanted.concurrency, dealt, strict=True))


def deal(
    sets: Sequence[Iterator[Prompt]], concurrencies: int, count: int
) -> list[tuple[Prompt, ...]]:
    """``count`` prompts, or as many as there are, for each of so many concurrencies, all
    different. Datasets alternate; one that runs out is skipped."""
    rows = itertools.zip_longest(
        *(zip(*[prompts] * concurrencies, strict=False) for prompts in sets)
    )
    groups = (group for row in rows for group in row if group is not None)
    return list(zip(*itertools.islice(groups, count), strict=True))


SLICE_S: Final = 2.0
"""Some dozens of steps, so that the step which a switch interrupts and the evicted processor caches
matter little."""
GUARD: Final = 'read _; for group; do kill -s CONT -- "-$group"; done'
"""A shell that resumes the servers when its standard input closes, that is, when we die: a stopped
server could not receive a SIGTERM."""

T = TypeVar("T")


class OwnClock:
    """Seconds that a server has run. Any thread reads it; the scheduling thread writes it."""

    def __init__(self) -> None:
        self._at: tuple[float, float | None] = 0.0, None

    def __call__(self) -> float:
        """Seconds so far."""
        before, since = self._at
        return before if since is None else before + time.perf_counter() - since

    def resume(self) -> None:
        """The server resumes."""
        self._at = self(), time.perf_counter()

    def stop(self) -> None:
        """The server stops."""
        self._at = self(), None


@dataclass(frozen=True)
class Work(Generic[T]):
    """The requests of a server, timed by its clock; ``answered`` counts its answers so far."""

    do: Callable[[OwnClock], T]
    answered: Callable[[], int]


def in_slices(
    works: Mapping[int, Work[T]], seconds: float = SLICE_S
) -> dict[int, T | BaseException]:
    """Do all ``works``, with one server running at a time. All servers run again when it returns or
    raises.

    Args:
        works: by the process group of each server.
        seconds: length of a slice; the last server runs to its end in one.

    Returns:
        the result of each work, or its exception.
    """
    clocks = {group: OwnClock() for group in works}
    running: dict[int, Future[T]] = {}
    pool = ThreadPoolExecutor(max(len(works), 1))
    with _guarded([*works]):
        try:
            for group in works:
                _signal(group, signal.SIGSTOP)
            while left := [g for g in works if g not in running or not running[g].done()]:
                group = min(left, key=lambda g: (works[g].answered(), clocks[g]()))
                _signal(group, signal.SIGCONT)
                clocks[group].resume()
                if group not in running:
                    running[group] = pool.submit(works[group].do, clocks[group])
                wait([running[group]], timeout=seconds if len(left) > 1 else None)
                _signal(group, signal.SIGSTOP)
                clocks[group].stop()
        finally:
            # Ctrl-C must not wait for answers; stopping the servers ends them
            pool.shutdown(wait=False, cancel_futures=True)
            for group in works:
                _signal(group, signal.SIGCONT)
    return {group: future.exception() or future.result() for group, future in running.items()}


@contextmanager
def _guarded(groups: list[int]) -> Iterator[None]:
    guard = subprocess.Popen(
        ["sh", "-c", GUARD, "sh", *map(str, groups)],
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(group, number)
