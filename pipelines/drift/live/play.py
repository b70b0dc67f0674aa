"""One live scenario, from the start of its stack to its stop: what was answered and told."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from decoder.contracts.bundle import FIRST
from decoder.contracts.errors import ProcessError
from decoder.contracts.trials import PLAIN
from pipelines.demo.traffic import CONCURRENCY, send
from pipelines.drift.live.scenario import Live, Phase
from pipelines.stack.running import Home, Ports, Stack, running
from pipelines.watch.ledger import Ledger
from pipelines.watch.observer import Observer
from pipelines.workloads import Prompt, interleaved

HOLDOUT: Final = 0.9
"""Share of the steps in which sides are compared: a few minutes have to give as many rounds as they
can."""
PATIENCE_SECONDS: Final = 900.0
"""For an answer: on a machine that does other work a slow one is no failure, and the sides of a
round are slow together."""
SETTLE_SECONDS: Final = 5.0
"""After the last answer, for the last round and the last status to be sent."""


@dataclass(frozen=True)
class Played:
    """What a scenario came to. Times in seconds since the epoch.

    ``began`` of each phase, ``answered`` of each request in the order of the answers, ``rounds`` as
    they lay on the topic, ``learned`` when each policy that was learned here came into force, and
    ``alarms`` when one was raised.
    """

    began: Sequence[float]
    answered: Sequence[float]
    rounds: Sequence[str]
    learned: Sequence[float]
    alarms: Sequence[float]


def play(live: Live, seed: int, console: Console, tell: Callable[[int], None]) -> Played:
    """Start a stack, send all requests, stop it; ``tell`` is told how many were answered.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: a part did not start, or died; or
            requests fail.
    """
    settings = {
        "HVD_WORKER_SIDES": f"{FIRST},{PLAIN}",
        "HVD_WORKER_HOLDOUT": str(HOLDOUT),
        "HVD_WORKER_START": live.start,
        "HVD_LEARNER_START": live.start,
        "HVD_LEARNER_ROLLOUT": "off",  # as in the study: what wins the gate is served
    }
    ledger = Ledger()
    with (
        tempfile.TemporaryDirectory(prefix="hvd-live-") as folder,
        running(Ports.free(), Home.under(Path(folder)), console, settings=settings) as stack,
    ):
        observer = Observer(stack.kafka, ledger)
        observer.start()
        try:
            began, answered = _sent(stack, live, seed, tell)
            time.sleep(SETTLE_SECONDS)
            stack.check()
            observer.check()
        finally:
            observer.close()
    learned = set(ledger.learned_versions())
    in_force = [at for at, version in ledger.policy_switches() if version in learned]
    rounds = [each.model_dump_json() for each in ledger.rounds]
    return Played(began, answered, rounds, in_force, ledger.alarms())


def asked(phase: Phase, seed: int) -> list[Prompt]:
    """The requests of a phase: its workloads in turn."""
    return list(islice(interleaved(phase.workloads, seed=seed), phase.requests))


def _sent(
    stack: Stack, live: Live, seed: int, tell: Callable[[int], None]
) -> tuple[list[float], list[float]]:
    began: list[float] = []
    answered: list[float] = []
    pool = ThreadPoolExecutor(CONCURRENCY)
    try:
        with httpx.Client(base_url=stack.api, timeout=PATIENCE_SECONDS) as client:
            for number, phase in enumerate(live.phases):
                began.append(time.time())

                def answer(prompt: Prompt, client: httpx.Client = client) -> Any:
                    return send(client, prompt, stack.model)

                for each in pool.map(answer, asked(phase, 100 * seed + number)):
                    stack.check()
                    if each.error:
                        raise ProcessError(f"a request failed at {stack.api}: {each.error}")
                    answered.append(each.time)
                    tell(len(answered))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return began, sorted(answered)
