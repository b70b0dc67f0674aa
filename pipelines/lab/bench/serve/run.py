"""``hvd bench serve``: sends the same requests to stock vLLM's servers and ours.

Every configuration is a real server process. Rounds go through all of them in the same order (A B C
A B C), each with a fresh server, so caches start empty and other load affects all alike. If memory
allows, the servers of a round can run together in time slices.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.lab.bench.serve import load
from pipelines.lab.bench.serve.load import Load, OwnClock, Reply, Work, in_slices
from pipelines.lab.bench.serve.setups import Plan, Setup, command
from pipelines.lab.bench.serve.summary import Level, ServerRun, report
from pipelines.prompts import Prompt
from pipelines.reports import Shown, complain, write_json
from pipelines.serve import command as serve
from pipelines.stack import processes
from pipelines.stack.processes import Part
from pipelines.stack.running import responds

WARM_UP_TOKENS: Final = 16
START_SECONDS: Final = 900.0  # compiling and capturing a large model takes minutes
COUNTER_SECONDS: Final = 10.0
"""How long a server's counters may lag behind its answers; it counts a step after sending."""
COUNTED: Final = {
    "tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_prompt_tokens": "prompt_tokens_cached_total",
    "drafts": "spec_decode_num_drafts_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}
"""vLLM's counters. ``drafts`` counts verifications of at least one token. ``accepted`` counts a
draft in full even if it runs past the end of an answer, so it is a little high for short
answers."""

Counters = dict[str, int]  # counts by the names in ``COUNTED``, or their growth
Launch = Callable[[Plan, Setup, int], tuple[list[str], dict[str, str]]]
"""Argument list and environment of a setup's server on a port of 127.0.0.1."""


def parse(page: str) -> Counters:
    """Read a page in Prometheus' text format. Engines behind one server are summed; missing
    counters are 0."""
    sums = dict.fromkeys(COUNTED.values(), 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:")
            if name != sample.name and name in sums:
                sums[name] += sample.value
    return {name: int(sums[counter]) for name, counter in COUNTED.items()}


def session_seconds(leader: int) -> float | None:
    """CPU seconds of all living processes in the session of process ``leader``; None if none lives.

    Wall clock includes the neighbours' load on a shared machine; this does not. Threads that spin
    while waiting count as busy; ``OMP_WAIT_POLICY=PASSIVE`` stops OpenMP from spinning.
    """
    seconds = []
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):  # ended, or foreign
            if os.getsid(pid) == leader:
                seconds.append(sum(psutil.Process(pid).cpu_times()[:2]))
    return sum(seconds) if seconds else None


@dataclass(frozen=True)
class Server:
    """A running server."""

    setup: Setup
    child: processes.Child
    url: str

    def ran(self) -> str:
        """The server's model runner and scheduling as it reports them, since vLLM can fall back to
        others. The runner is read from its log. "" if it does not say."""
        url = f"{self.url}/server_info?config_format=json"
        try:
            info = httpx.get(url, timeout=60.0, trust_env=False).json()
            ahead = info["vllm_config"]["scheduler_config"]["async_scheduling"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""
        log = self.child.log.read_text(errors="replace")
        quiet = "unknown runner" if " INFO " not in log else "V1"
        runner = "V2" if "Using V2 Model Runner" in log else quiet
        return f"{runner}, {'asynchronous' if ahead else 'step by step'}"

    def check(self, replies: Sequence[Reply]) -> None:
        """Check that the server lives and has answered at least one of its requests.

        Raises:
            ProcessError: it does not, or has not.
        """
        self.child.check()
        failed = [r for r in replies if r.error]
        if replies and len(failed) == len(replies):
            raise ProcessError(
                f"{self.setup.name} answered none of {len(failed)} requests; the first got: "
                f"{failed[0].error}. Its log: {self.child.log}"
            )

    def counters(self, clock: Callable[[], float], tokens: int = 0) -> Counters:
        """The server's counters, once they include ``tokens`` output tokens.

        Args:
            clock: runs while the server does.

        Raises:
            ProcessError: it does not answer, or counts fewer tokens.
        """
        until = clock() + COUNTER_SECONDS
        while True:
            try:
                response = httpx.get(f"{self.url}/metrics", timeout=60.0, trust_env=False)
                page = response.raise_for_status().text
            except httpx.HTTPError as error:
                raise ProcessError(f"{self.url}/metrics cannot be read: {error}.") from error
            if (counts := parse(page))["tokens"] >= tokens:
                return counts
            if clock() > until:
                raise ProcessError(
                    f"the server at {self.url} counts fewer tokens than it sent ({tokens}): is "
                    "somebody else sending to it, or were its statistics switched off?"
                )
            time.sleep(0.05)


def launch_vllm(plan: Plan, setup: Setup, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of vLLM's server, stock or with the plugin.

    Raises:
        ModelError, ProcessError, SettingsError: see :func:`pipelines.serve.command.check`.
    """
    options = replace(plan.options, port=port)
    serve.check(options)
    on_cpu = not machine.has_accelerator()
    launched = command(setup, options, os.environ, machine.cpu_flags(), on_cpu, plan.policy)
    serve.empty_metrics(options, launched[1])
    # else a server that was stopped would close waiting connections unread
    launched[1].setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "3600")
    launched[1].setdefault("VLLM_SERVER_DEV_MODE", "1")  # for /server_info
    return launched


@contextmanager
def starting(plan: Plan, launch: Launch) -> Iterator[Callable[[Setup, Path], Server]]:
    """Yield a function that starts a setup's server and waits until it is ready.

    That function raises ProcessError if the server does not start. On leaving, all servers are
    terminated at once; a second signal leaves none behind. Main thread only.
    """
    children: list[processes.Child] = []

    def start(setup: Setup, log: Path) -> Server:
        port = machine.free_port()
        arguments, environment = launch(plan, setup, port)
        url = f"http://127.0.0.1:{port}"
        with processes.signals_deferred():
            child = processes.start(Part(setup.name, arguments, log, environment=environment))
            children.append(child)
        try:
            processes.wait_until(child, lambda: responds(f"{url}/health"), START_SECONDS)
        except ProcessError:  # frees memory for the others
            processes.stop([child])
            raise
        return Server(setup, child, url)

    with processes.first_only():
        try:
            yield start
        finally:
            with ThreadPoolExecutor(max(len(children), 1)) as pool:
                pool.map(lambda child: processes.stop([child]), children)


def run(plan: Plan, out: Path, console: Console, launch: Launch = launch_vllm) -> dict[str, Any]:
    """Measure, and write the report to ``out``.

    A configuration whose server does not start is reported and skipped. On Ctrl-C the running
    server is stopped and the report covers the servers that had finished.

    Returns:
        the report.

    Raises:
        SettingsError: ``out`` cannot be written.
        ProcessError: no server could be measured.
    """
    runs: list[ServerRun] = []
    skipped: dict[str, str] = {}
    groups = [list(plan.setups)] if plan.together else [[setup] for setup in plan.setups]
    try:
        with Shown(console) as shown:
            for number, group in itertools.product(range(plan.rounds), groups):
                wanted = [setup for setup in group if setup.name not in skipped]
                tell = partial(_tell, shown, f"round {number + 1}/{plan.rounds}", Counter(), plan)
                logs = out.parent / f"{out.stem}-logs"
                measured, failed = measure(plan, wanted, number, logs, tell, launch)
                skipped |= failed
                complain(console, (f"{name} is left out: {why}" for name, why in failed.items()))
                for one in measured:
                    runs.append(one)
                    rates = ", ".join(f"{v.rate:.1f} at {v.concurrency}" for v in one.levels)
                    line = f"round {number + 1} {one.setup} ({one.ran or '-'}): {rates} tok/s"
                    console.print(line, highlight=False)
    finally:
        result = report(plan, runs, skipped)
        if runs:
            write_json(result, out)
    if not runs:
        raise ProcessError(f"no server could be measured: {next(iter(skipped.values()))}")
    return result


Tell = Callable[[Setup, str, int], None]
"""Called with a setup, what its server does, and the number of new answers."""


def _tell(
    progress: Shown, where: str, done: Counter[str], plan: Plan, setup: Setup, what: str, more: int
) -> None:
    done[setup.name] += more
    progress.step(f"{where} {setup.name}: {what}", done[setup.name], plan.requests)


def measure(
    plan: Plan, compared: Sequence[Setup], number: int, logs: Path, tell: Tell, launch: Launch
) -> tuple[list[ServerRun], dict[str, str]]:
    """Start servers, warm them up, measure every concurrency on each, and stop them.

    Args:
        number: the round. The first server rotates with each concurrency and round.

    Returns:
        the measured runs, and for each failed configuration why: its server did not start, died, or
            answered no request of a concurrency.

    Raises:
        ModelError, SettingsError: see :func:`launch_vllm`.
    """
    failed: dict[str, str] = {}
    runs: dict[str, ServerRun] = {}
    servers: list[Server] = []
    most = max(at_once for at_once, _ in plan.levels)
    with starting(plan, launch) as start:
        for setup in compared:
            tell(setup, "starting", 0)
            try:
                server = start(setup, logs / f"{number + 1}-{setup.name}.log")
                tell(setup, "warming up", 0)
                warming = Load(server.url, plan.model, most, WARM_UP_TOKENS)
                server.check(load.run(warming, plan.warm_up)[1])
            except ProcessError as error:
                failed[setup.name] = str(error)
                continue
            servers.append(server)
            runs[setup.name] = ServerRun(number, setup.name, (), server.ran())
        for turn, (at_once, prompts) in enumerate(plan.levels, number):
            first = turn % max(len(servers), 1)
            ordered = [*servers[first:], *servers[:first]]
            for server, measured in _level(plan, ordered, at_once, prompts, tell):
                name = server.setup.name
                if isinstance(measured, ProcessError):
                    failed[name] = str(measured)
                    servers.remove(server)
                    del runs[name]
                else:
                    runs[name] = replace(runs[name], levels=(*runs[name].levels, measured))
    return list(runs.values()), failed


def _level(
    plan: Plan, servers: Sequence[Server], at_once: int, prompts: Sequence[Prompt], tell: Tell
) -> Iterator[tuple[Server, Level | ProcessError]]:
    """Measure one concurrency on all servers, in time slices; yields each server with its result or
    error."""
    shared = plan.model, at_once, plan.max_tokens
    silence_s = load.REQUEST_SECONDS * len(servers)
    answered = Counter[str]()

    def measured(server: Server, clock: OwnClock) -> Level:
        def done() -> None:
            answered[server.setup.name] += 1
            tell(server.setup, f"{at_once} at a time", 1)

        leader = server.child.process.pid
        before, used = server.counters(clock), session_seconds(leader)
        wall, replies = load.run(Load(server.url, *shared, clock, silence_s), prompts, done)
        server.check(replies)
        sent = sum(len(r.tokens) for r in replies)
        after, now = server.counters(clock, before["tokens"] + sent), session_seconds(leader)
        grown = {name: after[name] - before[name] for name in after}
        cpu = None if now is None or used is None else now - used
        return Level(at_once, wall, tuple(replies), grown, cpu)

    def work(server: Server) -> Work[Level]:
        return Work(partial(measured, server), lambda: answered[server.setup.name])

    results = in_slices({server.child.process.pid: work(server) for server in servers})
    for server in servers:
        result = results[server.child.process.pid]
        if not isinstance(result, Level | ProcessError):
            raise result
        yield server, result
