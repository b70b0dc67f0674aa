"""One trouble after another under load, and what came of each."""

from __future__ import annotations

import itertools
import random
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from decoder.contracts.errors import ProcessError, SettingsError
from pipelines import machine
from pipelines.chaos.clients import Seen, answer_of, asking
from pipelines.chaos.stage import Stage
from pipelines.chaos.topic_audit import Account, TopicAudit
from pipelines.chaos.troubles import Trouble
from pipelines.stack import broker
from pipelines.stack.running import HVD, Home, Ports, responds, running
from pipelines.stack.supervision import Watch
from pipelines.watch.observer import Observer
from pipelines.workloads import prompts

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
    "HVD_LEARNER_BUFFER_EVENTS": "2000",  # full within minutes, so that a soak sees no filling
}


@dataclass(frozen=True)
class Incident:
    """What was seen of a trouble; ``faults`` must be empty. ``account`` is of the worker that lives
    at the end, ``back_s`` counted from the blow, or from the end of a trouble that lasts.
    """

    trouble: str
    back_s: dict[str, float]
    requests: int
    errors: int
    refused: int
    slowest_s: float
    account: Account
    faults: list[str]


@contextmanager
def staged(root: Path, standin: bool, seed: int, console: Console) -> Iterator[Stage]:
    """A stack of its own under ``root``, on free ports, and its answers before anything happened.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: it did not come up.
        SettingsError: the environment names a broker.
    """
    if broker.is_external():
        raise SettingsError(f"unset {broker.VARIABLE}: trouble is made on a stack of its own.")
    root = root.resolve()
    shutil.rmtree(root, ignore_errors=True)  # an earlier run's events would be counted
    own = {"HVD_WORKER_SPILL_FOLDER": str(root / "spill")}
    own["HVD_KAFKA_POLICY_KEY"] = secrets.token_hex(16)
    worker = (HVD[0], "-m", "pipelines.chaos.standin") if standin else (*HVD, "serve")
    options = () if standin else ("--", f"--shutdown-timeout={DRAIN_S}")
    asked = [prompt for kind in KINDS for prompt in itertools.islice(prompts(kind), 4)]
    with running(
        Ports.free(), Home.under(root), console, None, options, SETTINGS | own, worker
    ) as stack:
        watches = {n: Watch(p, serves_since=time.monotonic()) for n, p in stack.parts.items()}
        replies = [answer_of(stack.api, stack.model, prompt) for prompt in asked]
        if errors := [reply.error for reply in replies if reply.error]:
            raise ProcessError(f"a request failed before anything was done: {errors[0]}")
        answers, audit = [reply.tokens for reply in replies], TopicAudit()
        observer = Observer(stack.kafka, audit, patient=True, whole=True)
        observer.start()
        try:
            yield Stage(stack, root, audit, watches, asked, answers, random.Random(seed))
        finally:
            observer.close()


def make_trouble(stage: Stage, trouble: Trouble) -> Incident:
    """Make it under load, wait until all that it hit works again, and judge what was seen."""
    audit, hit = stage.audit, {*trouble.kills, *trouble.hurts} & stage.watches.keys()
    stage.back, known = {}, len(audit.faults)
    stage.until("all parts to run", lambda: all(map(stage.pid, stage.watches)))
    for watch in stage.watches.values():
        watch.attempts = 0  # else each trouble would lengthen the pause after the next
    _quiet(stage)
    accounts = {life: audit.account(life) for life in audit.last}
    with asking(stage.stack.api, stage.stack.model, stage.asked) as clients:
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
    account = audit.account(life).since(accounts.get(life, Account()))
    touched = [each for each in seen if each.ended >= began and each.began <= well]
    faults = [*audit.faults[known:], *audit.contradictions()]
    for each in seen:
        dying = "worker" in trouble.kills and began <= each.ended and each.began <= well + DYING_S
        faults += faults_of(each, stage, dying and not trouble.drains, dying)
    if "broker" in trouble.kills:  # without a warning: it may forget what it acknowledged
        audit.excused |= audit.last.keys()
    elif not account.adds_up:
        faults.append(f"the worker's events do not add up: {account}")
    errors, refused = sum(bool(s.error) for s in touched), sum(s.refused > 0 for s in touched)
    slowest = round(max(each.ended - each.began for each in touched), 1)
    return Incident(
        trouble.name, stage.back, len(touched), errors, refused, slowest, account, faults
    )


def _quiet(stage: Stage) -> None:
    """Wait, while nobody asks, until the worker has told of all it made, and that is seen."""
    audit, began = stage.audit, time.monotonic()

    def is_told() -> bool:
        said = audit.statuses[-1] if audit.statuses else None
        if said is None or not audit.has_spoken(began + SAID_S, said.process):
            return False
        return not (said.events_unaccounted or audit.account(said.life).waiting)

    stage.until("the worker to have nothing more to tell", is_told)
    # events and statuses come by partition, the latter perhaps first
    stage.within(SEEN_S, lambda: audit.account(audit.statuses[-1].life).adds_up)


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
    right, name = stage.answers[seen.prompt], stage.asked[seen.prompt].id
    if seen.tokens != right[: len(seen.tokens)]:
        return [f"a wrong answer to {name}"]
    if len(seen.tokens) < len(right) and not may_fail:
        return [f"a request failed: {seen.error or 'the answer broke off'}"]
    return ["a request was refused"] if seen.refused and not may_wait else []
