"""A stack under load: one trouble after another, or for long, and what came of it."""

from __future__ import annotations

import itertools
import math
import random
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from rich.console import Console

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.lab.chaos.clients import Seen, answer_of, asking
from pipelines.lab.chaos.topic_audit import TopicAudit, adds_up
from pipelines.lab.chaos.troubles import Stage, Trouble
from pipelines.stack.running import Home, Ports, responds, running
from pipelines.stack.supervision import Watch
from pipelines.watch.observer import Observer
from pipelines.workloads import prompts

Record = dict[str, Any]
KINDS: Final = ("edits", "tools", "qa", "chat")
DRAIN_S: Final = 45  # for requests under way when a worker is told to end, as in the fleet's files
DYING_S: Final = 2.0  # in which a killed worker's socket takes connections
SAID_S: Final = 1.5  # a worker says how it is once a second
SEEN_S: Final = 10.0  # after which what is on the topic has been read
EVERY_S: Final = 10.0
SMALL: Final = 0.05  # of its level an hour: what is surely growing, but by less, is flat
SILENT: Final = "silent for more than 30 s"
SETTINGS: Final = {
    machine.FLAGS_VARIABLE: "avx2",  # float32: answers are compared token for token
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HVD_LEARNER_ROLLOUT": "off",  # what wins is published at once: more publications to order
    "HVD_LEARNER_START": "counting",
    "HVD_LEARNER_MIN_EVENTS": "200",
    "HVD_LEARNER_CANDIDATE_EVERY": "64",
    "HVD_LEARNER_ROWS_PER_SECOND": "1000",
    "HVD_LEARNER_BUFFER_EVENTS": "2000",  # full within minutes, so that a soak sees no filling
}


@contextmanager
def staged(root: Path, seed: int, console: Console) -> Iterator[Stage]:
    """A stack of its own under ``root``, on free ports, and its answers before anything happened.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: it did not come up.
    """
    root = root.resolve()
    shutil.rmtree(root, ignore_errors=True)  # an earlier run's events would be counted
    own = {"HVD_KAFKA_POLICY_KEY": secrets.token_hex(16)}
    options = ("--", f"--shutdown-timeout={DRAIN_S}")
    sent = [prompt for kind in KINDS for prompt in itertools.islice(prompts(kind), 4)]
    with running(Ports.free(), Home.under(root), console, None, options, SETTINGS | own) as stack:
        watches = {n: Watch(p, serves_since=time.monotonic()) for n, p in stack.parts.items()}
        replies = [answer_of(stack.api, stack.model, prompt) for prompt in sent]
        if errors := [reply.error for reply in replies if reply.error]:
            raise ProcessError(f"a request failed before anything was done: {errors[0]}")
        answers, audit = [reply.tokens for reply in replies], TopicAudit()
        observer = Observer(stack.kafka, audit, since_s=math.inf)
        observer.start()
        stage = Stage(stack, root, audit, watches, sent, answers, random.Random(seed))
        try:
            stage.until("all to speak", lambda: bool(audit.statuses and audit.learner))
            yield stage
        finally:
            observer.close()


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


def growth(values: Sequence[float], hours: float) -> Record:
    """Level of a figure, its change an hour, and the verdict: ``grows``, ``falls`` or ``flat``.

    By the second and the last quarter of ``values``, sampled evenly in so many ``hours``: it moves
    where their middle four fifths lie apart. Buffers, pools and caches fill in the first quarter.
    """
    _, early, _, late = (np.percentile(q, (10, 50, 90)) for q in np.array_split(values, 4))
    hourly = float(late[1] - early[1]) / (hours / 2)
    verdict = "grows" if late[0] > early[2] else "falls" if late[2] < early[0] else "flat"
    if abs(hourly) <= SMALL * max(abs(early[1]), 1.0):
        verdict = "flat"
    return {"level": round(float(late[1]), 1), "an hour": round(hourly, 1), "verdict": verdict}


def soak(stage: Stage, minutes: float, tell: Callable[[float], None]) -> Record:
    """Let clients ask for so long, and ``tell`` the seconds that have passed: a row a figure with
    its growth, and ``faults``.
    """
    audit, samples, began = stage.audit, list[dict[str, float]](), time.monotonic()
    first = audit.counts
    with asking(stage.stack.api, stage.stack.model, stage.prompts) as clients:
        while (passed := time.monotonic() - began) < 60.0 * minutes:
            tell(passed)
            stage.within(EVERY_S)
            samples.append(_sample(stage))
    values = {name: [each[name] for each in samples] for name in samples[0]}
    figures = [{"figure": name} | growth(each, minutes / 60.0) for name, each in values.items()]
    faults = [f"{each['figure']} grows" for each in figures if each["verdict"] == "grows"]
    faults += [name for name, each in values.items() if SILENT in name and any(each)]
    faults += [f"no more events {name}" for name, n in audit.counts.items() if n <= first[name]]
    faults += [fault for seen in clients for each in seen for fault in faults_of(each, stage)]
    faults += [*stage.said, *audit.faults, *audit.contradictions()]
    return {"requests": sum(map(len, clients)), "rows": figures, "faults": faults}


def _sample(stage: Stage) -> dict[str, float]:
    worker, learner = stage.audit.statuses[-1], stage.audit.learner[-1]
    heard, late = stage.audit.spoke, time.monotonic() - 30.0
    found: dict[str, float] = {
        f"worker: {SILENT}": float(heard[worker.process] < late),
        "worker: events waiting": worker.queue_depth,
        f"learner: {SILENT}": float(heard[learner.process] < late),
        "learner: events behind": learner.lag_events,
    }
    for name in stage.watches:
        totals = np.zeros(3)
        for process in stage.tree(name):
            with suppress(psutil.Error), process.oneshot():
                mib = process.memory_info().rss / 2**20
                totals += process.num_fds(), process.num_threads(), mib
        figures = zip(("open files", "threads", "MiB resident"), totals.tolist(), strict=True)
        found |= {f"{name}: {what}": value for what, value in figures}
    return found
