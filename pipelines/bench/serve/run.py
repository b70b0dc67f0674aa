"""``hvd bench serve``: the same requests to one server after another, stock vLLM's and ours.

Every configuration is a real server process with a real client. Rounds go through all of them in
the same order (A B C A B C), each time with a fresh server, so that caches start empty and what the
machine does meanwhile falls on all alike. Where memory holds them all, they can be up together and
take turns at each concurrency: then it does so within minutes. What a server measured is kept as
soon as it is done: a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.bench.prompts import Prompt
from pipelines.bench.serve import load as serve_load
from pipelines.bench.serve.counters import Counters, parse, settled
from pipelines.bench.serve.cpu import session_seconds
from pipelines.bench.serve.load import Reply, name_of
from pipelines.bench.serve.passes import Journal, Level, ServerRun
from pipelines.bench.serve.report import report, write
from pipelines.bench.serve.setups import Setup, command
from pipelines.serve import command as serve
from pipelines.serve.command import ServeOptions
from pipelines.stack import processes
from pipelines.stack.running import responds

COUNTER_SECONDS: Final = 10.0
"""How long the server's counters may lag behind its answers."""
START_SECONDS: Final = 900.0
"""A large model that is compiled and captured takes minutes."""
WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True)
class Plan:
    """A whole benchmark: ``prompts`` holds one list for each of ``concurrency``.

    ``decides_by`` describes the policy that the hybrid starts with, ``policy`` if that is named.
    ``together``: all servers of a round are up at once and work in turn at each concurrency.
    """

    setups: tuple[Setup, ...]
    options: ServeOptions
    concurrency: tuple[int, ...]
    prompts: tuple[tuple[Prompt, ...], ...]
    warm_up: tuple[Prompt, ...]
    max_tokens: int
    rounds: int = 1
    policy: Path | None = None
    decides_by: str = "counted score"
    together: bool = False

    @property
    def model(self) -> str:
        """How the server calls the model."""
        return self.options.served_name or self.options.model

    def setting(self) -> dict[str, Any]:
        """What two runs must share for their figures to be put together."""
        return {
            "model": self.options.model,
            "drafter": self.options.drafter,
            "dtype": self.options.dtype,
            "server_arguments": list(self.options.extra),
            "policy": None if self.policy is None else str(self.policy),
            "environment": {
                k: v for k, v in sorted(os.environ.items()) if k.startswith(("HVD_", "VLLM_"))
            },
            "concurrency": list(self.concurrency),
            "max_tokens": self.max_tokens,
            "together": self.together,
            "prompts": [[name_of(p) for p in level] for level in self.prompts],
        }


Launch = Callable[[Plan, Setup, int], tuple[list[str], dict[str, str]]]
"""Argument list and environment of a setup's server on a port of 127.0.0.1."""
Show = Callable[[Setup, str, int], None]
"""Takes what a setup's server is doing and how many requests it answered since."""


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
    return made


def run(plan: Plan, out: Path, console: Console, launch: Launch = launch_vllm) -> dict[str, Any]:
    """Measure what ``out`` does not hold yet, and write the report there.

    A configuration whose server does not start is reported and passed over. On Ctrl-C the running
    server is stopped and the report written from the servers that had finished.

    Returns:
        the report: ``setting``, ``machine``, ``records`` (see
        :func:`pipelines.bench.serve.summary.summarise`) and ``skipped``.

    Raises:
        SettingsError: ``out`` belongs to another setting, or cannot be written.
        ProcessError: not one server could be measured.
    """
    journal = Journal(out.with_suffix(".runs.jsonl"), plan.setting())
    names = {s.name for s in plan.setups}
    runs, skipped = [r for r in journal.read() if r.setup in names], dict[str, str]()
    done = {(r.round, r.setup) for r in runs}
    logs = out.parent / f"{out.stem}-logs"
    requests = sum(map(len, plan.prompts))
    groups = list(_groups(plan, done))
    left = sum(len(group) for _, group in groups)
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("", total=(whole := left * requests))
            for number, group in groups:
                wanted = [setup for setup in group if setup.name not in skipped]
                show = _shown(progress, task, f"round {number + 1}/{plan.rounds}")
                found, failed = measure(plan, wanted, number, logs, show, launch)
                skipped |= failed
                for name, why in failed.items():
                    console.print(f"[red]{name} is left out:[/red] {escape(why)}")
                for one in found:
                    runs.append(one)
                    journal.add(one)
                    rates = ", ".join(f"{v.rate:.1f} at {v.concurrency}" for v in one.levels)
                    said = f"round {number + 1} {one.setup}: {rates} tok/s"
                    console.print(said, highlight=False)
                left -= len(group)
                progress.update(task, completed=whole - left * requests)
    except KeyboardInterrupt:
        console.print(
            f"stopped after {len(runs)} of {plan.rounds * len(plan.setups)} servers; the same "
            "command goes on from there.",
            highlight=False,
        )
        if runs:
            write(report(plan, runs, skipped), out)
        raise
    if not runs:
        raise ProcessError(f"no server could be measured: {next(iter(skipped.values()))}")
    made = report(plan, runs, skipped)
    write(made, out)
    return made


def _groups(plan: Plan, done: set[tuple[int, str]]) -> Iterator[tuple[int, list[Setup]]]:
    """What is up at the same time, with its round, as far as it is not ``done``."""
    for number in range(plan.rounds):
        left = [s for s in plan.setups if (number, s.name) not in done]
        yield from ((number, g) for g in ([left] if plan.together else [[s] for s in left]) if g)


def measure(
    plan: Plan,
    compared: Sequence[Setup],
    number: int,
    logs: Path,
    show: Show,
    launch: Launch = launch_vllm,
) -> tuple[list[ServerRun], dict[str, str]]:
    """Start servers, warm them up, put every concurrency to each in turn, stop them.

    Args:
        number: the round; who is first moves on by one with each concurrency and each round.

    Returns:
        what was measured, and of each configuration left out why: its server did not start, died,
        or answered no request of a concurrency.

    Raises:
        ModelError, SettingsError: see :func:`launch_vllm`.
    """
    failed: dict[str, str] = {}
    found: dict[str, ServerRun] = {}
    servers: list[Server] = []
    with ExitStack() as stack:
        for setup in compared:
            show(setup, "starting", 0)
            began = time.monotonic()
            log = logs / f"{number + 1}-{setup.name}.log"
            try:
                server = stack.enter_context(running(plan, setup, log, launch))
                startup = time.monotonic() - began
                show(setup, "warming up", 0)
                most = max(plan.concurrency)
                _, warm = serve_load.run(server.url, plan.model, plan.warm_up, most, WARM_UP_TOKENS)
                server.check(warm)
            except ProcessError as error:
                failed[setup.name] = str(error)
                continue
            servers.append(server)
            policy = plan.decides_by if setup.method == "hybrid" else ""
            found[setup.name] = ServerRun(number, setup.name, startup, (), policy)
        for turn, level in enumerate(zip(plan.concurrency, plan.prompts, strict=True), number):
            first = turn % max(len(servers), 1)
            for server in [*servers[first:], *servers[:first]]:
                name = server.setup.name
                try:
                    measured = _level(plan, server, *level, show)
                except ProcessError as error:
                    failed[name] = str(error)
                    servers.remove(server)
                    del found[name]
                else:
                    found[name] = replace(found[name], levels=(*found[name].levels, measured))
    return list(found.values()), failed


def _level(
    plan: Plan, server: Server, concurrency: int, prompts: Sequence[Prompt], show: Show
) -> Level:
    show(server.setup, what := f"{concurrency} at a time", 0)
    before, used = parse(server.page()), session_seconds(server.child.process.pid)
    answered = functools.partial(show, server.setup, what, 1)
    wall, replies = serve_load.run(
        server.url, plan.model, prompts, concurrency, plan.max_tokens, answered
    )
    server.check(replies)
    tokens = before.tokens + sum(len(r.tokens) for r in replies)
    counters = _counters(server, tokens).since(before)
    now = session_seconds(server.child.process.pid)
    cpu = None if now is None or used is None else now - used
    return Level(concurrency, wall, tuple(replies), counters, cpu)


@contextmanager
def running(plan: Plan, setup: Setup, log: Path, launch: Launch) -> Iterator[Server]:
    """A server for ``setup``, ready; stopped on leaving, however it is left."""
    port = machine.free_port()
    arguments, environment = launch(plan, setup, port)
    url = f"http://127.0.0.1:{port}"
    child = processes.start(setup.name, arguments, log, environment)
    try:
        processes.wait_until(child, lambda: responds(f"{url}/health"), START_SECONDS)
        yield Server(setup, child, url)
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave it
        try:
            processes.stop([child])
        finally:
            signal.signal(signal.SIGINT, before)


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


def _counters(server: Server, tokens: int) -> Counters:
    deadline = time.monotonic() + COUNTER_SECONDS

    def wait() -> None:
        if time.monotonic() > deadline:
            raise ProcessError(
                f"the server at {server.url} counts fewer tokens than it sent ({tokens}): is "
                "somebody else sending to it, or were its statistics switched off?"
            )
        time.sleep(0.05)

    return settled(server.page, tokens, wait)


def _shown(progress: Progress, task: TaskID, where: str) -> Show:
    def show(setup: Setup, what: str, answered: int) -> None:
        said = f"{where} {setup.name}: {what}"
        progress.update(task, description=said, advance=answered)

    return show
