"""The demo's traffic: chat requests of the project's workloads, in phases."""

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
from pipelines.replay.engine import Trace
from pipelines.stack.running import KEY_VARIABLE
from pipelines.watch.ledger import Ledger, Phase
from pipelines.workloads import interleaved

REQUEST_SECONDS: Final = 900.0  # timeout of an answer; steps of seconds were seen on busy machines
IDLE_SECONDS: Final = 0.2
FEW, MANY = 8, 40  # tokens of the answers from whose times a plain step's is known
LEAST_S: Final = 1e-3
"""Smallest difference of the two times; a stall in the shorter one must not make a step free."""
SLOW_S: Final = 8.0
"""If the shorter request takes longer, it is enough; the other would take minutes."""


@dataclass(frozen=True)
class Plan:
    """A planned phase.

    It alternates between ``workloads`` and needs the time of at least ``steps`` plain steps.
    ``kind`` is the group it is compared in, ``sessions`` the number of concurrent sessions,
    ``tokens`` the most tokens of an answer. ``learns`` marks the phase that waits for the learner.
    ``broken`` breaks the drafter, ``mistake`` promotes a policy that drafts nothing. If time is
    short, phases are left out in the order of ``left_out``; 0 is never.
    """

    name: str
    workloads: tuple[str, ...]
    steps: int
    kind: str
    sessions: int = 3
    tokens: int = 112
    learns: bool = False
    broken: bool = False
    mistake: bool = False
    left_out: int = 0


# A pair of blocks takes about a hundred tokens of each request, or seventy steps, and an interval
# ten pairs. A step of three requests takes a third longer.
PLANS: Final = (
    Plan("one agent", ("edits", "tools"), 750, "agents", sessions=1),
    Plan("three agents", ("edits", "tools"), 900, "agents", left_out=1),
    Plan("conversation", ("chat", "code"), 900, "conversation"),
    Plan("drafter broken", ("chat", "code"), 900, "broken drafter", broken=True, left_out=3),
    Plan("drafter mended", ("chat", "code"), 700, "conversation", left_out=2),
    # many short answers: each is one cluster of evidence, and none is so long that a looping one
    # outweighs the others
    Plan("records", ("records",), 2000, "records", sessions=16, tokens=96, learns=True),
    Plan("bad policy", ("edits", "tools"), 600, "bad policy", mistake=True, left_out=4),
)


def planned(step_s: float, seconds: float) -> list[tuple[Plan, float]]:
    """The phases that fit into ``seconds`` if a plain step takes ``step_s``, each with its seconds.
    Mandatory phases share what there is."""
    plans = list(PLANS)
    for plan in sorted((p for p in PLANS if p.left_out), key=lambda p: p.left_out):
        if sum(p.steps for p in plans) * step_s <= seconds:
            break
        plans.remove(plan)
    whole = sum(p.steps for p in plans)
    return [(plan, seconds * plan.steps / whole) for plan in plans]


MOST_SESSIONS: Final = max(plan.sessions for plan in PLANS)
FAILURES_ALLOWED: Final = 2 * MOST_SESSIONS
"""Consecutive failed requests before the run ends; one stall fails all running ones."""


def connected(url: str) -> httpx.Client:
    """A client of the worker at ``url``, with the environment's API key."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return httpx.Client(base_url=url, headers=headers, timeout=REQUEST_SECONDS, trust_env=False)


class Traffic:
    """Threads that send requests to ``url`` until stopped.

    Phases are recorded in ``ledger``. ``counts`` are requests ``answered`` and ``failed``, and
    output ``tokens``; ``answers`` are prompts and answers by phase, which stay here.
    """

    def __init__(self, url: str, model: str, ledger: Ledger) -> None:
        self.url = url
        self.model = model
        self.ledger = ledger
        self.counts: Counter[str] = Counter()
        self.answers: dict[str, list[Trace]] = {}
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._next: Iterator[Prompt] = iter(())
        self._threads: list[threading.Thread] = []
        self._plan = Plan("", (), 0, "", sessions=0)
        self._errors: list[str] = []  # of the last consecutive requests

    def begin(self, plan: Plan, seed: int) -> None:
        """Send ``plan``'s workloads from now on; running requests finish."""
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
        """Stop sending, and wait for running requests."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS)
        self._end_phase()

    def _end_phase(self) -> None:
        if phases := self.ledger.phases:
            phases[-1] = replace(phases[-1], ended=time.time())

    def check(self) -> None:
        """Check that requests succeed.

        Raises:
            ProcessError: too many failed in a row; with the last error.
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
            "return_token_ids": True,
        }
        tokens, error, read, written = 0, "", None, None
        try:
            response = client.post("/v1/chat/completions", json=body)
            if response.is_success:
                answer = response.json()
                tokens = int(answer["usage"]["completion_tokens"])
                read = answer.get("prompt_token_ids")
                written = answer["choices"][0].get("token_ids")
            else:
                error = f"HTTP {response.status_code}: {response.text[:200]}"
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            self._errors = [*self._errors, error] if error else []
            self.counts.update({"failed" if error else "answered": 1, "tokens": tokens})
            if read and written:
                trace = Trace(prompt.id, read, written, prompt.dataset, plan.tokens)
                self.answers.setdefault(plan.name, []).append(trace)
        if error:
            self.stopping.wait(1.0)


def plain_step_s(url: str, model: str) -> float:
    """Seconds of a step without drafts for one request: the shorter of two measurements, after a
    warm-up request.

    Raises:
        ProcessError: the worker does not answer.
    """
    messages = [{"role": "user", "content": "Count from one to one hundred."}]
    body = {"model": model, "messages": messages, "temperature": 0, "ignore_eos": True}
    body["vllm_xargs"] = {"hvd_speculate": "off"}
    try:
        with httpx.Client(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client:

            def seconds(tokens: int) -> float:
                began = time.monotonic()
                request = body | {"max_tokens": tokens}
                client.post("/v1/chat/completions", json=request).raise_for_status()
                return time.monotonic() - began

            if (first := seconds(FEW)) > SLOW_S and (first := seconds(FEW)) > SLOW_S:
                return first / FEW
            took = min(seconds(MANY) - seconds(FEW) for _ in range(2))
            return max(took, LEAST_S) / (MANY - FEW)
    except httpx.HTTPError as error:
        raise ProcessError(f"the worker does not answer at {url}: {error}") from error
