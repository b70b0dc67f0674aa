"""A stack under load: one trouble after another, and what came of it."""

from __future__ import annotations

import itertools
import math
import random
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.lab.bench.serve.load import Load, Reply, answers
from pipelines.lab.chaos.troubles import Stage, TopicAudit, Trouble, adds_up
from pipelines.prompts import Prompt
from pipelines.stack.running import PLAIN, Home, Ports, responds, running
from pipelines.stack.up import Watch
from pipelines.watch.ledger import Observer
from pipelines.workloads import prompts

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
    with httpx.Client(base_url=api, timeout=SILENCE_S, verify=PLAIN, trust_env=False) as client:
        return next(answers(client, load, prompt))


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


Record = dict[str, Any]
KINDS: Final = ("edits", "tools", "qa", "chat")
DRAIN_S: Final = 45  # for requests under way when a worker is told to end, as in the fleet's files
DYING_S: Final = 2.0  # in which a killed worker's socket takes connections
SAID_S: Final = 1.5  # a worker says how it is once a second
SEEN_S: Final = 10.0  # after which what is on the topic has been read
SETTINGS: Final = {
    machine.FLAGS_VARIABLE: "avx2",  # float32: answers are compared token for token
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HVD_LEARNER_ROLLOUT": "off",  # what wins is published at once: more publications to order
    "HVD_LEARNER_START": "counting",
    "HVD_LEARNER_MIN_EVENTS": "200",
    "HVD_LEARNER_CANDIDATE_EVERY": "64",
    "HVD_LEARNER_ROWS_PER_SECOND": "1000",
}


@contextmanager
def staged(root: Path, seed: int, console: Console) -> Iterator[Stage]:
    """A stack of its own under ``root``, on free ports, and its answers before anything happened.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: it did not come up.
    """
    root = root.resolve()
    own = {"HVD_KAFKA_POLICY_KEY": secrets.token_hex(16)}
    options = ("--", f"--shutdown-timeout={DRAIN_S}")
    sent = [prompt for kind in KINDS for prompt in itertools.islice(prompts(kind), 4)]
    home = Home.under(root, is_fresh=True)  # an earlier run's events would be counted
    with running(Ports.free(), home, console, options, SETTINGS | own) as stack:
        watches = {n: Watch(p, serves_since=time.monotonic()) for n, p in stack.parts.items()}
        replies = [answer_of(stack.api, stack.model, prompt) for prompt in sent]
        if errors := [reply.error for reply in replies if reply.error]:
            raise ProcessError(f"a request failed before anything was done: {errors[0]}")
        answers, audit = [reply.tokens for reply in replies], TopicAudit()
        stage = Stage(stack, root, audit, watches, sent, answers, random.Random(seed))
        with Observer(stack.kafka, audit, since_s=math.inf):
            stage.until("all to speak", lambda: bool(audit.statuses and audit.learner))
            yield stage


def make_trouble(stage: Stage, trouble: Trouble) -> Record:
    """Make it under load, wait until all that it hit works again, and judge what was seen.

    Returns:
        ``faults``, which must be empty, and figures: "back s" counts from the blow, or from the end
        of a trouble that lasts, and the rest are requests from then until all was back, and events
        of the worker that lives now.
    """
    audit, hit = stage.audit, {*trouble.kills, *trouble.hurts}
    stage.back, known = {}, len(audit.faults)
    stage.until("all parts to run", lambda: all(map(stage.pid, stage.watches)))
    for watch in stage.watches.values():
        watch.attempts = 0  # else each trouble would lengthen the pause after the next
    _quiet(stage)
    accounts = {life: audit.account(life) for life in list(audit.last)}
    with asking(stage.stack.api, stage.stack.model, stage.prompts) as clients:
        stage.within(1.0 + 3.0 * stage.draw.random())  # the blow falls at any place of requests
        before, began = {name: stage.pid(name) for name in hit}, time.monotonic()
        with trouble.hold(stage):
            stage.within(trouble.seconds)
        since = time.monotonic()

        def all_back() -> bool:
            for name in hit - stage.back.keys():
                anew = name not in trouble.kills or stage.pid(name) not in (0, before[name])
                if anew and _works(stage, name, since, clients):
                    stage.back[name] = round(time.monotonic() - since, 1)
            return hit <= stage.back.keys()

        stage.until(f"{', '.join(hit)} to come back", all_back)
        well = time.monotonic()
        stage.until("answers to all", lambda: all(s and s[-1].began > well for s in clients))
    _quiet(stage)
    life, seen = audit.statuses[-1].life, [*itertools.chain.from_iterable(clients)]
    account = audit.account(life, accounts.get(life, {}))
    touched = [each for each in seen if each.ended >= began and each.began <= well]
    faults = [*audit.faults[known:], *audit.contradictions()]
    for each in seen:
        dying = "worker" in trouble.kills and began <= each.ended and each.began <= well + DYING_S
        faults += faults_of(each, stage, dying and not trouble.drains, dying)
    if "broker" in trouble.kills:  # without a warning: it may forget what it acknowledged
        audit.excused |= audit.last.keys()
    elif not adds_up(account):
        faults.append(f"the worker's events do not add up: {account}")
    return {
        "trouble": trouble.name,
        "back s": stage.back,
        "requests": len(touched),
        "errors": sum(bool(each.error) for each in touched),
        "refused": sum(each.refused > 0 for each in touched),
        "slowest s": round(max((s.ended - s.began for s in touched), default=0.0), 1),
        "events": account,
        "faults": faults,
    }


def _quiet(stage: Stage) -> None:
    """Wait, while nobody asks, until the worker has told of all it made, and that is seen."""
    audit, began = stage.audit, time.monotonic()

    def is_told() -> bool:
        said = audit.statuses[-1]
        is_new = audit.has_spoken(began + SAID_S, said.process)
        return is_new and not (said.events_unaccounted or audit.account(said.life)["waiting"])

    stage.until("the worker to have nothing more to tell", is_told)
    # events and statuses come by partition, the latter perhaps first
    stage.within(SEEN_S, lambda: adds_up(audit.account(audit.statuses[-1].life)))


def _works(stage: Stage, name: str, since: float, clients: Sequence[Sequence[Seen]]) -> bool:
    """Whether the part was seen at its work after ``since``."""
    if name == "registry":
        return responds(f"{stage.stack.tracking_uri}/health")
    if name == "worker":
        return any(s.began > since and not s.error for seen in clients for s in seen)
    # what was said since has come through the broker
    return stage.audit.has_spoken(since, f"-{stage.pid(name)}" if name == "learner" else "")


def faults_of(
    seen: Seen, stage: Stage, may_fail: bool = False, may_wait: bool = False
) -> list[str]:
    """What is wrong with an answer; one that broke off must be right as far as it goes."""
    right, name = stage.answers[seen.prompt], stage.prompts[seen.prompt].id
    if seen.tokens != right[: len(seen.tokens)]:
        return [f"a wrong answer to {name}"]
    if len(seen.tokens) < len(right) and not may_fail:
        return [f"a request failed: {seen.error or 'the answer broke off'}"]
    return ["a request was refused"] if seen.refused and not may_wait else []
