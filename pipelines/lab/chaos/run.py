"""Injects faults into a stack under load, and checks the outcome."""

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
from pipelines.lab.chaos.injections import Fault, Stage, TopicAudit, adds_up
from pipelines.prompts import Prompt
from pipelines.stack.running import PLAIN, Home, Ports, responds, running
from pipelines.stack.up import PartState
from pipelines.watch.ledger import Observer
from pipelines.workloads import prompts

CLIENTS: Final = 3
MAX_TOKENS: Final = 24
SILENCE_S: Final = 300.0
AGAIN_S: Final = 0.2  # before a refused request is sent again
UNREAD_S: Final = 0.5
"""A connection lost within this time, without a byte of an answer, was accepted by a closing port
and never read."""


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
    """The answer to ``prompt``, over a new connection."""
    load = Load(api, model, 1, MAX_TOKENS)
    with httpx.Client(base_url=api, timeout=SILENCE_S, verify=PLAIN, trust_env=False) as client:
        return next(answers(client, load, prompt))


def _is_refusal(reply: Reply) -> bool:
    """Whether no server began the request: nobody listened, or a draining server refused it."""
    if reply.error.startswith(("ConnectError", "HTTP 503")):
        return True
    unread = reply.error.startswith(("ReadError", "WriteError")) or "without send" in reply.error
    return unread and not reply.tokens and reply.latency_s < UNREAD_S


@contextmanager
def asking(api: str, model: str, prompts: Sequence[Prompt]) -> Iterator[list[list[Seen]]]:
    """Send ``prompts`` repeatedly while the block lasts; yields the answers of each client."""
    seen_by_client: list[list[Seen]] = [[] for _ in range(CLIENTS)]
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

    threads = [
        threading.Thread(target=run, args=each, daemon=True) for each in enumerate(seen_by_client)
    ]
    for thread in threads:
        thread.start()
    try:
        yield seen_by_client
    finally:
        stopping.set()
        for thread in threads:
            thread.join(SILENCE_S)


Record = dict[str, Any]
KINDS: Final = ("edits", "tools", "qa", "chat")
DRAIN_S: Final = 45  # for running requests when a worker is terminated, as in the fleet's files
DYING_S: Final = 2.0  # a killed worker's socket accepts connections for so long
STATUS_S: Final = 1.5  # a worker sends a status every second
READ_S: Final = 10.0  # within which records on a topic are read
SETTINGS: Final = {
    machine.FLAGS_VARIABLE: "avx2",  # float32: answers are compared token for token
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HVD_LEARNER_ROLLOUT": "off",  # winners are published at once: more publications to order
    "HVD_LEARNER_START": "counting",
    "HVD_LEARNER_MIN_EVENTS": "200",
    "HVD_LEARNER_CANDIDATE_EVERY": "64",
    "HVD_LEARNER_ROWS_PER_SECOND": "1000",
}


@contextmanager
def staged(root: Path, seed: int, console: Console) -> Iterator[Stage]:
    """A stack under ``root`` on free ports, with its reference answers.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: it did not start.
    """
    root = root.resolve()
    own = {"HVD_KAFKA_POLICY_KEY": secrets.token_hex(16)}
    options = ("--", f"--shutdown-timeout={DRAIN_S}")
    sent = [prompt for kind in KINDS for prompt in itertools.islice(prompts(kind), 4)]
    home = Home.under(root, is_fresh=True)  # else an earlier run's events would count
    with running(Ports.free(), home, console, options, SETTINGS | own) as stack:
        watches = {n: PartState(p, serves_since=time.monotonic()) for n, p in stack.parts.items()}
        replies = [answer_of(stack.api, stack.model, prompt) for prompt in sent]
        if errors := [reply.error for reply in replies if reply.error]:
            raise ProcessError(f"a request failed before the first injection: {errors[0]}")
        answers, audit = [reply.tokens for reply in replies], TopicAudit()
        stage = Stage(stack, root, audit, watches, sent, answers, random.Random(seed))
        with Observer(stack.kafka, audit, since_s=math.inf):
            stage.until("all to report", lambda: bool(audit.statuses and audit.learner))
            yield stage


def inject(stage: Stage, injection: Fault) -> Record:
    """Inject a fault under load, wait until all affected parts work again, and check what was seen.

    Returns:
        ``faults``, which must be empty, and figures. "back s" counts from the injection, or from
        its end if it lasts. The other figures are of the requests from then until recovery, and of
        the events of the worker that runs now.
    """
    audit, affected = stage.audit, {*injection.kills, *injection.hurts}
    stage.back, known = {}, len(audit.faults)
    stage.until("all parts to run", lambda: all(map(stage.pid, stage.watches)))
    for watch in stage.watches.values():
        watch.attempts = 0  # else each injection would lengthen the next pause before a restart
    _drain(stage)
    accounts = {life: audit.account(life) for life in list(audit.last)}
    with asking(stage.stack.api, stage.stack.model, stage.prompts) as clients:
        stage.within(1.0 + 3.0 * stage.draw.random())  # at any point of a request
        before, began = {name: stage.pid(name) for name in affected}, time.monotonic()
        with injection.hold(stage):
            stage.within(injection.seconds)
        since = time.monotonic()

        def is_recovered() -> bool:
            for name in affected - stage.back.keys():
                restarted = name not in injection.kills or stage.pid(name) not in (0, before[name])
                if restarted and _works(stage, name, since, clients):
                    stage.back[name] = round(time.monotonic() - since, 1)
            return affected <= stage.back.keys()

        stage.until(f"{', '.join(affected)} to come back", is_recovered)
        recovered = time.monotonic()
        stage.until("answers to all", lambda: all(s and s[-1].began > recovered for s in clients))
    _drain(stage)
    life, seen = audit.statuses[-1].life, [*itertools.chain.from_iterable(clients)]
    account = audit.account(life, accounts.get(life, {}))
    touched = [each for each in seen if each.ended >= began and each.began <= recovered]
    faults = [*audit.faults[known:], *audit.contradictions()]
    faults += _faults(stage, injection, seen, (began, recovered), account)
    return {
        "trouble": injection.name,
        "back s": stage.back,
        "requests": len(touched),
        "errors": sum(bool(each.error) for each in touched),
        "refused": sum(each.refused > 0 for each in touched),
        "slowest s": round(max((s.ended - s.began for s in touched), default=0.0), 1),
        "events": account,
        "faults": faults,
    }


def _faults(
    stage: Stage, injection: Fault, seen: Sequence[Seen], span: tuple[float, float],
    account: dict[str, int],
) -> list[str]:  # fmt: skip
    """What is wrong with answers and the delivery counters."""
    (began, recovered), kills, faults = span, injection.kills, list[str]()
    for each in seen:
        dying = "worker" in kills and began <= each.ended and each.began <= recovered + DYING_S
        faults += faults_of(each, stage, dying and not injection.drains, dying)
    if "broker" in kills:  # killed without warning, it may lose what it acknowledged
        stage.audit.excused |= stage.audit.last.keys()
    elif not adds_up(account):
        faults.append(f"the worker's events do not add up: {account}")
    return faults


def _drain(stage: Stage) -> None:
    """Wait, without requests, until the worker has sent all events and they were read."""
    audit, began = stage.audit, time.monotonic()

    def is_told() -> bool:
        status = audit.statuses[-1]
        is_new = audit.has_spoken(began + STATUS_S, status.process)
        return is_new and not (status.events_unaccounted or audit.account(status.life)["waiting"])

    stage.until("the worker to send all events", is_told)
    # statuses may arrive before events of other partitions
    stage.within(READ_S, lambda: adds_up(audit.account(audit.statuses[-1].life)))
    # a learner may have read the last events of a killed worker before the audit does
    stage.within(READ_S, lambda: not audit.contradictions())


def _works(stage: Stage, name: str, since: float, clients: Sequence[Sequence[Seen]]) -> bool:
    """Whether the part was seen working after ``since``."""
    if name == "registry":
        return responds(f"{stage.stack.tracking_uri}/health")
    if name == "worker":
        return any(s.began > since and not s.error for seen in clients for s in seen)
    # for the broker: any status since then has passed through it
    return stage.audit.has_spoken(since, f"-{stage.pid(name)}" if name == "learner" else "")


def faults_of(
    seen: Seen, stage: Stage, may_fail: bool = False, may_wait: bool = False
) -> list[str]:
    """What is wrong with an answer; an aborted one must be right as far as it goes."""
    right, name = stage.answers[seen.prompt], stage.prompts[seen.prompt].id
    if seen.tokens != right[: len(seen.tokens)]:
        return [f"a wrong answer to {name}"]
    if len(seen.tokens) < len(right) and not may_fail:
        return [f"a request failed: {seen.error or 'the answer broke off'}"]
    return ["a request was refused"] if seen.refused and not may_wait else []
