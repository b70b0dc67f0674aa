"""One server of a benchmark: started, asked for its metrics, stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.plan import Plan
from pipelines.bench.serve.setups import Setup, command
from pipelines.serve import command as serve
from pipelines.stack import interrupts, processes
from pipelines.stack.running import responds

START_SECONDS: Final = 900.0
"""A large model that is compiled and captured takes minutes."""

Launch = Callable[[Plan, Setup, int], tuple[list[str], dict[str, str]]]
"""Argument list and environment of a setup's server on a port of 127.0.0.1."""


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

    def page(self) -> str:
        """Its metrics, in Prometheus' text format.

        Raises:
            ProcessError: it does not answer.
        """
        try:
            return httpx.get(f"{self.url}/metrics", timeout=30.0).raise_for_status().text
        except httpx.HTTPError as error:
            raise ProcessError(f"{self.url}/metrics cannot be read: {error}.") from error


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
            child = processes.start(setup.name, arguments, log, environment)
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
