"""Traffic for a demo: chat requests of the project's workloads, a few at a time, in phases."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import httpx

from decoder.contracts.errors import ProcessError
from pipelines.prompts import Prompt
from pipelines.stack.running import KEY_VARIABLE
from pipelines.watch.ledger import Ledger, Phase
from pipelines.workloads import interleaved

REQUEST_SECONDS: Final = 120.0
IDLE_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Plan:
    """One phase to come: its share of the whole time, the workloads it alternates, the ``kind``
    that it is compared as, how many sessions send at a time, the most tokens of an answer, whether
    it is for the learner, who ``learns`` there, and what is wrong meanwhile: the worker's drafter
    is ``broken``, or a policy that drafts nothing is champion by ``mistake``."""

    name: str
    workloads: tuple[str, ...]
    share: float
    kind: str
    sessions: int = 3
    tokens: int = 160
    learns: bool = False
    broken: bool = False
    mistake: bool = False


PLANS: Final = (
    Plan("one agent", ("edits", "tools"), 0.13, "agents", sessions=1),
    Plan("three agents", ("edits", "tools"), 0.15, "agents"),
    Plan("conversation", ("chat", "code"), 0.13, "conversation"),
    Plan("drafter broken", ("chat", "code"), 0.16, "broken drafter", broken=True),
    Plan("drafter mended", ("chat", "code"), 0.12, "conversation"),
    # short answers, many at a time: each is a word for or against a candidate, and drafts are dear;
    # none so long that one of those that loop outweighs the others
    Plan("records", ("records",), 0.2, "records", sessions=16, tokens=96, learns=True),
    Plan("bad policy", ("edits", "tools"), 0.11, "bad policy", mistake=True),
)
MOST_SESSIONS: Final = max(plan.sessions for plan in PLANS)
FAILURES_ALLOWED: Final = 2 * MOST_SESSIONS
"""Requests in a row that may fail before the run is given up: one stall fails all under way."""


def connected(url: str) -> httpx.Client:
    """A client of the worker at ``url``, with the key that the environment has a worker ask for."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return httpx.Client(base_url=url, headers=headers, timeout=REQUEST_SECONDS, trust_env=False)


class Traffic:
    """Threads that send one request after another to ``url`` until stopped.

    Phases are written into ``ledger``; ``counts`` are requests ``answered`` and ``failed``, and
    ``tokens`` of the answers, ``answers`` those of each phase.
    """

    def __init__(self, url: str, model: str, ledger: Ledger) -> None:
        self.url = url
        self.model = model
        self.ledger = ledger
        self.counts: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._next: Iterator[Prompt] = iter(())
        self._threads: list[threading.Thread] = []
        self._plan = Plan("", (), 0.0, "", sessions=0)
        self._errors: list[str] = []  # of the last requests, one after another

    def begin(self, plan: Plan, seed: int) -> None:
        """From now on send ``plan``'s workloads; requests under way finish as they are."""
        with self._lock:
            self._end_phase()
            self.ledger.phases.append(Phase(plan.name, plan.workloads, plan.kind, time.time()))
            self._next = interleaved(plan.workloads, seed=seed)
            self._plan = plan
        while len(self._threads) < MOST_SESSIONS:
            place = (len(self._threads),)
            thread = threading.Thread(target=self._send_all, args=place, daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """Send nothing more, and wait for what is under way."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS)
        self._end_phase()

    def _end_phase(self) -> None:
        if phases := self.ledger.phases:
            phases[-1] = replace(phases[-1], ended=time.time())

    def check(self) -> None:
        """Do nothing while requests succeed.

        Raises:
            ProcessError: too many in a row failed; with what the last one got.
        """
        if len(self._errors) > FAILURES_ALLOWED:
            many = f"{len(self._errors)} requests in a row failed at {self.url}"
            raise ProcessError(f"{many}; the last: {self._errors[-1]}")

    def _send_all(self, place: int) -> None:
        with connected(self.url) as client:
            while not self.stopping.is_set():
                if place < self._plan.sessions:
                    self.send(client)
                else:
                    self.stopping.wait(IDLE_SECONDS)

    def send(self, client: httpx.Client) -> None:
        """Send the next request and count its outcome; after a failure wait a second."""
        with self._lock:
            prompt, plan = next(self._next), self._plan
        body = {
            "model": self.model,
            "messages": list(prompt.messages),
            "temperature": 0,
            "max_tokens": plan.tokens,
            "vllm_xargs": {"hvd_workload": prompt.dataset},
        }
        tokens, error = 0, ""
        try:
            response = client.post("/v1/chat/completions", json=body)
            if response.is_success:
                tokens = int(response.json()["usage"]["completion_tokens"])
            else:
                error = f"HTTP {response.status_code}: {response.text[:200]}"
        except (httpx.HTTPError, KeyError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            self._errors = [*self._errors, error] if error else []
            self.counts.update({"failed" if error else "answered": 1, "tokens": tokens})
            self.answers[plan.name] += not error
        if error:
            self.stopping.wait(1.0)
