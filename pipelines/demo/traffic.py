"""Traffic for a demo: chat requests of the project's workloads, a few at a time, in phases."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from decoder.contracts.errors import ProcessError
from pipelines.watch.ledger import Answer, Ledger, Phase
from pipelines.workloads import Prompt, interleaved

CONCURRENCY: Final = 3
MAX_TOKENS: Final = 160
REQUEST_SECONDS: Final = 120.0
FAILURES_ALLOWED: Final = 5
"""Requests in a row that may fail before the run is given up."""


@dataclass(frozen=True)
class Plan:
    """One phase to come: its share of the whole time, the workloads it alternates, and whether the
    worker's drafter is ``broken`` meanwhile."""

    name: str
    workloads: tuple[str, ...]
    share: float
    broken: bool = False


PLANS: Final = (
    Plan("agentic", ("edits", "tools"), 0.34),
    Plan("conversation", ("chat", "code"), 0.24),
    Plan("drafter broken", ("chat", "code"), 0.18, broken=True),
    Plan("drafter mended", ("chat", "code"), 0.24),
)


def body(prompt: Prompt, model: str, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """The request for ``prompt``, as the chat completions API takes it."""
    return {
        "model": model,
        "messages": list(prompt.messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        "vllm_xargs": {"hvd_workload": prompt.workload},
    }


@dataclass
class Traffic:
    """Threads that send one request after another until stopped; they write to ``ledger``."""

    url: str
    model: str
    ledger: Ledger
    stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next: Iterator[Prompt] = field(default_factory=lambda: iter(()))
    _threads: list[threading.Thread] = field(default_factory=list)
    _failures: int = 0

    def begin(self, plan: Plan, seed: int) -> None:
        """From now on send ``plan``'s workloads; requests under way finish as they are."""
        now = time.time()
        with self._lock:
            phases = self.ledger.phases
            if phases:
                phases[-1] = replace(phases[-1], ended=now)
            phases.append(Phase(plan.name, plan.workloads, now))
            self._next = interleaved(plan.workloads, seed=seed)
        while len(self._threads) < CONCURRENCY:
            thread = threading.Thread(target=self._send_all, daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """Send nothing more, and wait for what is under way."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS)
        if self.ledger.phases:
            self.ledger.phases[-1] = replace(self.ledger.phases[-1], ended=time.time())

    def check(self) -> None:
        """Do nothing while requests succeed.

        Raises:
            ProcessError: too many in a row failed; with what the last one got.
        """
        if self._failures > FAILURES_ALLOWED:
            raise ProcessError(
                f"{self._failures} requests in a row failed at {self.url}; the last: "
                f"{self.ledger.answers[-1].error}"
            )

    def _send_all(self) -> None:
        with httpx.Client(base_url=self.url, timeout=REQUEST_SECONDS) as client:
            while not self.stopping.is_set():
                with self._lock:
                    prompt = next(self._next)
                answer = send(client, prompt, self.model)
                with self._lock:
                    self._failures = self._failures + 1 if answer.error else 0
                    self.ledger.answers.append(answer)
                if answer.error:
                    self.stopping.wait(1.0)


def send(client: httpx.Client, prompt: Prompt, model: str) -> Answer:
    """One request and its answer; a failure becomes an answer with ``error``."""
    began = time.time()
    tokens, error = 0, ""
    try:
        response = client.post("/v1/chat/completions", json=body(prompt, model))
        if response.is_success:
            tokens = int(response.json()["usage"]["completion_tokens"])
        else:
            error = f"HTTP {response.status_code}: {response.text[:200]}"
    except (httpx.HTTPError, KeyError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    now = time.time()
    return Answer(prompt.workload, now, now - began, tokens, error)
