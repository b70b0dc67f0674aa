"""``hvd bench serve``: the same requests to one server after another, stock vLLM's and ours.

Every configuration is a real server process with a real client. Rounds go through all of them in
the same order (A B C A B C), each time with a fresh server, so that caches start empty and what the
machine does meanwhile falls on all alike. What a server measured is kept as soon as it is done: a
run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from decoder.contracts.errors import ProcessError
from pipelines import machine, processes, serve
from pipelines.bench import serve_load
from pipelines.bench.prompts import Prompt
from pipelines.bench.serve_counters import Counters, parse, settled
from pipelines.bench.serve_cpu import session_seconds
from pipelines.bench.serve_load import Reply, name_of
from pipelines.bench.serve_report import report, write
from pipelines.bench.serve_runs import Journal, Level, ServerRun
from pipelines.bench.serve_setups import Setup, command
from pipelines.serve import ServeOptions
from pipelines.stack import responds

COUNTER_SECONDS: Final = 10.0
"""How long the server's counters may lag behind its answers."""
START_SECONDS: Final = 900.0
"""A large model that is compiled and captured takes minutes."""
WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True)
class Plan:
    """A whole benchmark: ``prompts`` holds one list for each of ``concurrency``.

    ``decides_by`` describes the policy that the hybrid starts with, ``policy`` if that is named.
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
            "prompts": [[name_of(p) for p in level] for level in self.prompts],
        }


Launch = Callable[[Plan, Setup, int], tuple[list[str], dict[str, str]]]
"""Argument list and environment of a setup's server on a port of 127.0.0.1."""


def launch_vllm(plan: Plan, setup: Setup, port: int) -> tuple[list[str], dict[str, str]]:
    """vLLM's server, stock or with the plugin.

    Raises:
        ModelError, ProcessError, SettingsError: see :func:`pipelines.serve.check`.
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
        :func:`pipelines.bench.serve_summary.summarise`) and ``skipped``.

    Raises:
        SettingsError: ``out`` belongs to another setting, or cannot be written.
        ProcessError: not one server could be measured.
    """
    journal = Journal(out.with_suffix(".runs.jsonl"), plan.setting())
    names = {s.name for s in plan.setups}
    runs, skipped = [r for r in journal.read() if r.setup in names], dict[str, str]()
    done = {(r.round, r.setup) for r in runs}
    todo = [(r, s) for r in range(plan.rounds) for s in plan.setups if (r, s.name) not in done]
    requests = sum(map(len, plan.prompts))
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("", total=len(todo) * requests)
            for index, (number, setup) in enumerate(todo):
                if setup.name in skipped:
                    continue
                log = out.parent / f"{out.stem}-logs" / f"{number + 1}-{setup.name}.log"
                show = _shown(progress, task, f"round {number + 1}/{plan.rounds} {setup.name}")
                try:
                    one = measure(plan, setup, number, log, show, launch)
                except ProcessError as error:
                    skipped[setup.name] = str(error)
                    console.print(f"[red]{setup.name} is left out:[/red] {escape(str(error))}")
                    continue
                finally:
                    progress.update(task, completed=(index + 1) * requests)
                runs.append(one)
                journal.add(one)
                rates = ", ".join(f"{v.rate:.1f} at {v.concurrency}" for v in one.levels)
                console.print(f"round {number + 1} {setup.name}: {rates} tok/s", highlight=False)
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


def measure(
    plan: Plan,
    setup: Setup,
    number: int,
    log: Path,
    show: Callable[[str, int], None],
    launch: Launch = launch_vllm,
) -> ServerRun:
    """Start one server, warm it up, put every concurrency to it, stop it.

    Args:
        show: takes what is being done and how many requests were answered since.

    Raises:
        ProcessError: the server did not start, died, or answered no request of a concurrency.
        ModelError, SettingsError: see :func:`launch_vllm`.
    """
    show("starting", 0)
    began = time.monotonic()
    with running(plan, setup, log, launch) as (child, url):
        startup = time.monotonic() - began
        show("warming up", 0)
        most = max(plan.concurrency)
        _, warm = serve_load.run(url, plan.model, plan.warm_up, most, WARM_UP_TOKENS)
        check(child, warm, setup)
        levels = []
        for concurrency, prompts in zip(plan.concurrency, plan.prompts, strict=True):
            show(what := f"{concurrency} at a time", 0)
            before, used = parse(page(url)), session_seconds(child.process.pid)
            wall, replies = serve_load.run(
                url,
                plan.model,
                prompts,
                concurrency,
                plan.max_tokens,
                functools.partial(show, what, 1),
            )
            check(child, replies, setup)
            tokens = before.tokens + sum(len(r.tokens) for r in replies)
            counters = _counters(url, tokens).since(before)
            now = session_seconds(child.process.pid)
            cpu = None if now is None or used is None else now - used
            levels.append(Level(concurrency, wall, tuple(replies), counters, cpu))
    policy = plan.decides_by if setup.method == "hybrid" else ""
    return ServerRun(number, setup.name, startup, tuple(levels), policy)


@contextmanager
def running(
    plan: Plan, setup: Setup, log: Path, launch: Launch
) -> Iterator[tuple[processes.Child, str]]:
    """A server for ``setup``, ready, with its address; stopped on leaving, however it is left."""
    port = machine.free_port()
    arguments, environment = launch(plan, setup, port)
    url = f"http://127.0.0.1:{port}"
    child = processes.start(setup.name, arguments, log, environment)
    try:
        processes.wait_until(child, lambda: responds(f"{url}/health"), START_SECONDS)
        yield child, url
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave it
        try:
            processes.stop([child])
        finally:
            signal.signal(signal.SIGINT, before)


def check(child: processes.Child, replies: Sequence[Reply], setup: Setup) -> None:
    """Do nothing unless the server died, or answered not one of its requests.

    Raises:
        ProcessError: it did.
    """
    child.check()
    failed = [r for r in replies if r.error]
    if replies and len(failed) == len(replies):
        raise ProcessError(
            f"{setup.name} answered none of {len(failed)} requests; the first got: "
            f"{failed[0].error}. Its log: {child.log}"
        )


def page(url: str) -> str:
    """The metrics of the server at ``url``, in Prometheus' text format.

    Raises:
        ProcessError: it does not answer.
    """
    try:
        return httpx.get(f"{url}/metrics", timeout=30.0).raise_for_status().text
    except httpx.HTTPError as error:
        raise ProcessError(f"{url}/metrics cannot be read: {error}.") from error


def _counters(url: str, tokens: int) -> Counters:
    deadline = time.monotonic() + COUNTER_SECONDS

    def wait() -> None:
        if time.monotonic() > deadline:
            raise ProcessError(
                f"the server at {url} counts fewer tokens than it sent ({tokens}): is somebody "
                "else sending to it, or were its statistics switched off?"
            )
        time.sleep(0.05)

    return settled(lambda: page(url), tokens, wait)


def _shown(progress: Progress, task: TaskID, where: str) -> Callable[[str, int], None]:
    def show(what: str, answered: int) -> None:
        progress.update(task, description=f"{where}: {what}", advance=answered)

    return show
