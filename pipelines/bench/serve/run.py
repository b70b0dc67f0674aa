"""``hvd bench serve``: the same requests to one server after another, stock vLLM's and ours.

Every configuration is a real server process with a real client. Rounds go through all of them in
the same order (A B C A B C), each time with a fresh server, so that caches start empty and what the
machine does meanwhile falls on all alike. Where memory holds them all, they can be up together and
run in slices (``slices``): then it does so within seconds. What a server measured is kept as soon
as it is done: a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import ProcessError
from pipelines.bench.serve import load as serve_load
from pipelines.bench.serve.counters import Counters, parse, settled
from pipelines.bench.serve.cpu import session_seconds
from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.passes import Journal, Level, ServerRun
from pipelines.bench.serve.plan import Plan
from pipelines.bench.serve.report import report
from pipelines.bench.serve.server import Launch, Server, launch_vllm, starting
from pipelines.bench.serve.setups import Setup
from pipelines.bench.serve.slices import OwnClock, Work, in_slices
from pipelines.progress import Shown
from pipelines.prompts import Prompt
from pipelines.reports import write_json

COUNTER_SECONDS: Final = 10.0
"""How long the server's counters may lag behind its answers."""
WARM_UP_TOKENS: Final = 16

Show = Callable[[Setup, str, int], None]
"""Takes what a setup's server is doing and how many requests it answered since."""


def run(plan: Plan, out: Path, console: Console, launch: Launch = launch_vllm) -> dict[str, Any]:
    """Measure what ``out`` does not hold yet, and write the report there.

    A configuration whose server does not start is reported and passed over. On Ctrl-C the running
    server is stopped and the report written from the servers that had finished.

    Returns:
        the report.

    Raises:
        SettingsError: ``out`` belongs to another setting, or cannot be written.
        ProcessError: not one server could be measured.
    """
    journal = Journal(out.with_suffix(".runs.jsonl"), plan.setting())
    names = {s.name for s in plan.setups}
    runs = [r for r in journal.read() if r.setup in names]
    done = {(r.round, r.setup) for r in runs}
    skipped = _left_behind(plan, done)
    logs = out.parent / f"{out.stem}-logs"
    requests = plan.requests
    groups = list(_groups(plan, done))
    left = sum(len(group) for _, group in groups)
    try:
        with Shown(console) as shown:
            whole = left * requests
            for number, group in groups:
                wanted = [setup for setup in group if setup.name not in skipped]
                where = f"round {number + 1}/{plan.rounds}"
                show = _shown(shown, where, whole - left * requests, whole)
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
    except KeyboardInterrupt:
        console.print(
            f"stopped after {len(runs)} of {plan.rounds * len(plan.setups)} servers; the same "
            "command goes on from there.",
            highlight=False,
        )
        if runs:
            write_json(report(plan, runs, skipped), out)
        raise
    if not runs:
        raise ProcessError(f"no server could be measured: {next(iter(skipped.values()))}")
    made = report(plan, runs, skipped)
    write_json(made, out)
    return made


def _groups(plan: Plan, done: set[tuple[int, str]]) -> Iterator[tuple[int, list[Setup]]]:
    """What is up at the same time, with its round, as far as it is not ``done``."""
    for number in range(plan.rounds):
        left = [s for s in plan.setups if (number, s.name) not in done]
        if not plan.together:
            yield from ((number, [s]) for s in left)
        elif len(left) == len(plan.setups):  # who failed beside the others is not measured alone
            yield number, left


def _left_behind(plan: Plan, done: set[tuple[int, str]]) -> dict[str, str]:
    """Why configurations have no part in rounds whose servers were up together without them."""
    begun = {number for number, _ in done} if plan.together else set[int]()
    why = "failed in a round before, beside the others: name another --json to run them all again."
    return {s.name: why for s in plan.setups if any((n, s.name) not in done for n in begun)}


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
    with starting(plan, launch) as start:
        for setup in compared:
            show(setup, "starting", 0)
            began = time.monotonic()
            log = logs / f"{number + 1}-{setup.name}.log"
            try:
                server = start(setup, log)
                startup = time.monotonic() - began
                show(setup, "warming up", 0)
                most = max(plan.concurrency)
                _, warm = serve_load.run(server.url, plan.model, plan.warm_up, most, WARM_UP_TOKENS)
                server.check(warm)
            except ProcessError as error:
                failed[setup.name] = str(error)
                continue
            servers.append(server)
            changed = (f"{name}={value}" for name, value in setup.changes)
            policy = ", ".join([plan.decides_by, *changed]) if setup.ours else ""
            found[setup.name] = ServerRun(number, setup.name, startup, (), policy)
        for turn, level in enumerate(zip(plan.concurrency, plan.prompts, strict=True), number):
            first = turn % max(len(servers), 1)
            ordered = [*servers[first:], *servers[:first]]
            for server, measured in _level(plan, ordered, *level, show):
                name = server.setup.name
                if isinstance(measured, ProcessError):
                    failed[name] = str(measured)
                    servers.remove(server)
                    del found[name]
                else:
                    found[name] = replace(found[name], levels=(*found[name].levels, measured))
    return list(found.values()), failed


def _level(
    plan: Plan, servers: Sequence[Server], concurrency: int, prompts: Sequence[Prompt], show: Show
) -> Iterator[tuple[Server, Level | ProcessError]]:
    """Put one concurrency to all servers, in slices; of each what was measured, or why nothing."""
    before: dict[int, tuple[Counters, float | None]] = {}
    works: dict[int, Work[tuple[float, list[Reply]]]] = {}
    for server in servers:
        pid = server.child.process.pid
        try:
            before[pid] = parse(server.page()), session_seconds(pid)
        except ProcessError as error:
            yield server, error
            continue
        works[pid] = _work(plan, server, concurrency, prompts, len(servers), show)
    made = in_slices(works)
    for server in servers:
        pid = server.child.process.pid
        if pid not in made:
            continue
        done = made[pid]
        if isinstance(done, BaseException):
            raise done
        try:
            yield server, _measured(server, concurrency, *done, *before[pid])
        except ProcessError as error:
            yield server, error


def _work(
    plan: Plan, server: Server, concurrency: int, prompts: Sequence[Prompt], beside: int, show: Show
) -> Work[tuple[float, list[Reply]]]:
    answered = 0

    def done() -> None:
        nonlocal answered
        answered += 1
        show(server.setup, f"{concurrency} at a time", 1)

    def do(clock: OwnClock) -> tuple[float, list[Reply]]:
        return serve_load.run(
            server.url, plan.model, prompts, concurrency, plan.max_tokens, done, plan.by_turns,
            clock, serve_load.REQUEST_SECONDS * beside,
        )  # fmt: skip

    return Work(do, lambda: answered)


def _measured(
    server: Server,
    concurrency: int,
    wall: float,
    replies: Sequence[Reply],
    before: Counters,
    used: float | None,
) -> Level:
    server.check(replies)
    tokens = before.tokens + sum(len(r.tokens) for r in replies)
    counters = _counters(server, tokens).since(before)
    now = session_seconds(server.child.process.pid)
    cpu = None if now is None or used is None else now - used
    return Level(concurrency, wall, tuple(replies), counters, cpu)


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


def _shown(shown: Shown, where: str, before: int, whole: int) -> Show:
    done = before

    def show(setup: Setup, what: str, answered: int) -> None:
        nonlocal done
        done += answered
        shown.step(f"{where} {setup.name}: {what}", done, whole)

    return show
