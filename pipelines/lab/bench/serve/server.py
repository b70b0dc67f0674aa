"""One server of a benchmark: started, asked for its counters and processor time, stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.lab.bench.serve.load import Reply
from pipelines.lab.bench.serve.setups import Plan, Setup, command
from pipelines.serve import command as serve
from pipelines.stack import interrupts, processes
from pipelines.stack.processes import Part
from pipelines.stack.running import responds

START_SECONDS: Final = 900.0
"""A large model that is compiled and captured takes minutes."""
COUNTER_SECONDS: Final = 10.0
"""How long the server's counters may lag behind its answers: it counts a step after sending."""
COUNTED: Final = {
    "tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_prompt_tokens": "prompt_tokens_cached_total",
    "drafts": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "steps": "iteration_tokens_total_count",
}
"""vLLM's own counters. ``drafts`` are verifications that had anything to verify. ``accepted``
counts a draft that runs past the end of an answer in full, so it is a little high where answers are
short. ``steps`` are the engine's, each for all running requests at once."""

Counters = dict[str, int]
"""Of ``COUNTED``, or their growth between two readings."""
Launch = Callable[[Plan, Setup, int], tuple[list[str], dict[str, str]]]
"""Argument list and environment of a setup's server on a port of 127.0.0.1."""


def parse(page: str) -> Counters:
    """Read a page in Prometheus' text format; a counter that is not there counts zero.

    Several engines behind one server are added up.
    """
    sums = dict.fromkeys(COUNTED.values(), 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:")
            if name != sample.name and name in sums:
                sums[name] += sample.value
    return {name: int(sums[counter]) for name, counter in COUNTED.items()}


def session_seconds(leader: int) -> float | None:
    """User and system seconds so far of all living processes in the session of process ``leader``;
    None where none lives.

    On a shared machine the clock on the wall measures the neighbours, too. Threads that wait by
    spinning count as busy: ``OMP_WAIT_POLICY=PASSIVE`` keeps OpenMP from it.
    """
    found = []
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):  # it has ended, or is none of ours
            if os.getsid(pid) == leader:
                found.append(sum(psutil.Process(pid).cpu_times()[:2]))
    return sum(found) if found else None


@dataclass(frozen=True)
class Server:
    """A running server."""

    setup: Setup
    child: processes.Child
    url: str

    def check(self, replies: Sequence[Reply]) -> None:
        """Do nothing unless the server died, or answered not one of its requests.

        Raises:
            ProcessError: it did.
        """
        self.child.check()
        failed = [r for r in replies if r.error]
        if replies and len(failed) == len(replies):
            raise ProcessError(
                f"{self.setup.name} answered none of {len(failed)} requests; the first got: "
                f"{failed[0].error}. Its log: {self.child.log}"
            )

    def counters(self, clock: Callable[[], float], tokens: int = 0) -> Counters:
        """Its counters, once they hold ``tokens`` that were sent; ``clock`` goes while it runs.

        Raises:
            ProcessError: it does not answer, or counts fewer.
        """
        until = clock() + COUNTER_SECONDS
        while True:
            try:
                page = httpx.get(f"{self.url}/metrics", timeout=60.0).raise_for_status().text
            except httpx.HTTPError as error:
                raise ProcessError(f"{self.url}/metrics cannot be read: {error}.") from error
            if (found := parse(page))["tokens"] >= tokens:
                return found
            if clock() > until:
                raise ProcessError(
                    f"the server at {self.url} counts fewer tokens than it sent ({tokens}): is "
                    "somebody else sending to it, or were its statistics switched off?"
                )
            time.sleep(0.05)


def launch_vllm(plan: Plan, setup: Setup, port: int) -> tuple[list[str], dict[str, str]]:
    """vLLM's server, stock or with the plugin.

    Raises:
        ModelError, ProcessError, SettingsError: see :func:`pipelines.serve.command.check`.
    """
    options = replace(plan.options, port=port)
    serve.check(options)
    on_cpu = not machine.has_accelerator()
    made = command(setup, options, os.environ, machine.cpu_flags(), on_cpu, plan.policy)
    serve.empty_metrics(options, made[1])
    # A server that was stopped for a while would close, unread, connections that waited for it.
    made[1].setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "3600")
    return made


@contextmanager
def starting(plan: Plan, launch: Launch) -> Iterator[Callable[[Setup, Path], Server]]:
    """What starts a setup's server, with its log, and returns it ready; it raises ProcessError of
    one that does not come up.

    On leaving, however it is left, all servers are told at once to end; a second signal does not
    leave one behind. Main thread only.
    """
    children: list[processes.Child] = []

    def start(setup: Setup, log: Path) -> Server:
        port = machine.free_port()
        arguments, environment = launch(plan, setup, port)
        url = f"http://127.0.0.1:{port}"
        with interrupts.held():
            child = processes.start(Part(setup.name, arguments, log, environment=environment))
            children.append(child)
        try:
            processes.wait_until(child, lambda: responds(f"{url}/health"), START_SECONDS)
        except ProcessError:  # what it holds is the others'
            processes.stop([child])
            raise
        return Server(setup, child, url)

    with interrupts.first_only():
        try:
            yield start
        finally:
            with ThreadPoolExecutor(max(len(children), 1)) as pool:
                pool.map(lambda child: processes.stop([child]), children)
