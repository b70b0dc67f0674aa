"""``hvd bench serve``: the same requests to one server after another, stock vLLM's and ours.

Every configuration is a real server process with a real client. Rounds go through all of them in
the same order (A B C A B C), each time with a fresh server, so that caches start empty and what the
machine does meanwhile falls on all alike. Where memory holds them all, they can be up together and
run in slices (``slices``): then it does so within seconds.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from decoder.contracts.errors import ProcessError
from pipelines.lab.bench.render import complain
from pipelines.lab.bench.serve import load
from pipelines.lab.bench.serve.load import Load
from pipelines.lab.bench.serve.server import Launch, Server, launch_vllm, session_seconds, starting
from pipelines.lab.bench.serve.setups import Plan, Setup
from pipelines.lab.bench.serve.slices import OwnClock, Work, in_slices
from pipelines.lab.bench.serve.summary import Level, ServerRun, report
from pipelines.progress import Shown
from pipelines.prompts import Prompt
from pipelines.reports import write_json

WARM_UP_TOKENS: Final = 16


def run(plan: Plan, out: Path, console: Console, launch: Launch = launch_vllm) -> dict[str, Any]:
    """Measure, and write the report to ``out``.

    A configuration whose server does not start is reported and passed over. On Ctrl-C the running
    server is stopped and the report written from the servers that had finished.

    Returns:
        the report.

    Raises:
        SettingsError: ``out`` cannot be written.
        ProcessError: not one server could be measured.
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
                found, failed = measure(plan, wanted, number, logs, tell, launch)
                skipped |= failed
                complain(console, (f"{name} is left out: {why}" for name, why in failed.items()))
                for one in found:
                    runs.append(one)
                    rates = ", ".join(f"{v.rate:.1f} at {v.concurrency}" for v in one.levels)
                    said = f"round {number + 1} {one.setup}: {rates} tok/s"
                    console.print(said, highlight=False)
    finally:
        made = report(plan, runs, skipped)
        if runs:
            write_json(made, out)
    if not runs:
        raise ProcessError(f"no server could be measured: {next(iter(skipped.values()))}")
    return made


Tell = Callable[[Setup, str, int], None]
"""Told what a setup's server does, and how many requests it answered since."""


def _tell(
    shown: Shown, where: str, done: Counter[str], plan: Plan, setup: Setup, what: str, more: int
) -> None:
    done[setup.name] += more
    shown.step(f"{where} {setup.name}: {what}", done[setup.name], plan.requests)


def measure(
    plan: Plan, compared: Sequence[Setup], number: int, logs: Path, tell: Tell, launch: Launch
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
    most = max(at_once for at_once, _ in plan.levels)
    with starting(plan, launch) as start:
        for setup in compared:
            tell(setup, "starting", 0)
            began = time.monotonic()
            try:
                server = start(setup, logs / f"{number + 1}-{setup.name}.log")
                startup = time.monotonic() - began
                tell(setup, "warming up", 0)
                warming = Load(server.url, plan.model, most, WARM_UP_TOKENS)
                server.check(load.run(warming, plan.warm_up)[1])
            except ProcessError as error:
                failed[setup.name] = str(error)
                continue
            servers.append(server)
            found[setup.name] = ServerRun(number, setup.name, startup, ())
        for turn, (at_once, prompts) in enumerate(plan.levels, number):
            first = turn % max(len(servers), 1)
            ordered = [*servers[first:], *servers[:first]]
            for server, measured in _level(plan, ordered, at_once, prompts, tell):
                name = server.setup.name
                if isinstance(measured, ProcessError):
                    failed[name] = str(measured)
                    servers.remove(server)
                    del found[name]
                else:
                    found[name] = replace(found[name], levels=(*found[name].levels, measured))
    return list(found.values()), failed


def _level(
    plan: Plan, servers: Sequence[Server], at_once: int, prompts: Sequence[Prompt], tell: Tell
) -> Iterator[tuple[Server, Level | ProcessError]]:
    """Put one concurrency to all servers, in slices; of each what was measured, or why nothing."""
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

    made = in_slices({server.child.process.pid: work(server) for server in servers})
    for server in servers:
        found = made[server.child.process.pid]
        if not isinstance(found, Level | ProcessError):
            raise found
        yield server, found
