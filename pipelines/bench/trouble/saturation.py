"""What becomes of speed when the batch fills: the trouble ``batch`` of ``hvd bench trouble``.

One vLLM server for each fixed method and one for the hybrid are up together and work in turn, so
that what the machine does meanwhile falls on all alike. First one request at a time is under way,
then a crowd, which makes every token of a step dear, then one again. The hybrid has ``SETTLES``
engine steps to find out each time; what is measured are the requests sent after those, the same to
all servers.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from pipelines import workloads
from pipelines.bench.serve import load as serve_load
from pipelines.bench.serve.counters import Counters, parse
from pipelines.bench.serve.passes import Level
from pipelines.bench.serve.plan import Plan
from pipelines.bench.serve.server import Launch, Server, launch_vllm, starting
from pipelines.bench.serve.setups import setups
from pipelines.bench.trouble.stretches import PHASES, SETTLES, Speed, Stretch, Tick
from pipelines.prompts import Prompt
from pipelines.serve.command import chosen

METHODS: Final = ("none", "eagle3", "suffix", "hybrid")
EAGLE3_K: Final = 2
SUFFIX_K: Final = 24
LARGEST_PROMPT: Final = 4_000
"""Characters: about a thousand tokens, which leave room for an answer in any context."""
SETTLING: Final = 3
MEASURED: Final = 4
"""Requests for each one under way that a server answers, before they count and when they do, until
it is the next one's turn: so many that most of the time all places are taken."""


def measure(
    measured: int,
    tokens: int,
    crowd: int,
    tick: Tick,
    launch: Launch = launch_vllm,
    settles: int = SETTLES,
) -> Iterator[Stretch]:
    """Fill the batch and empty it.

    Args:
        measured: requests of each phase that count, for each one under way.
        tokens: of an answer, at most.
        crowd: requests under way in the middle phase.

    Yields:
        a stretch for each of ``PHASES``, as soon as it is known.

    Raises:
        ModelError: the embedded model or its drafter is not installed.
        ProcessError: a server did not start, or died.
    """
    plan = _plan(tokens, crowd)
    stream = _prompts()
    logs = tempfile.TemporaryDirectory(prefix="hvd-saturation-")
    with logs as where, starting(plan, launch) as start:
        servers = []
        for setup in plan.setups:
            tick(f"batch: starting {setup.name}")
            servers.append(start(setup, Path(where) / f"{setup.name}.log"))
        hybrid = servers[-1]
        for phase, at_once in zip(PHASES, (1, crowd, 1), strict=True):
            before, settled = _steps(hybrid), 0
            while settled < settles:
                prompts = list(itertools.islice(stream, SETTLING * at_once))
                for server in servers:
                    tick(f"batch {phase}: {server.setup.name} settles")
                    _send(plan, server, prompts, at_once)
                settled = _steps(hybrid) - before
            speeds = {METHODS[i]: Speed() for i in range(len(servers))}
            turns = max(measured // MEASURED, 1)
            for turn in range(turns):
                prompts = list(itertools.islice(stream, measured // turns * at_once))
                turned = turn % len(servers)
                for server in [*servers[turned:], *servers[:turned]]:
                    tick(f"batch {phase}: {server.setup.name}")
                    made, seconds = steady(_send(plan, server, prompts, at_once))
                    speeds[server.setup.method].add(made, seconds, len(prompts))
            fallback, falls = in_force(hybrid.page())
            yield Stretch("batch", phase, speeds, settled, fallback, falls)


def steady(level: Level) -> tuple[int, float]:
    """Output tokens, and seconds, while as many requests were under way as should be.

    That is from the first answers' end, all prompts having been read at once before it, to when
    no prompt was left to begin. Fewer than two prompts for each one under way know no such time
    and are counted from beginning to end.
    """
    ends, apart = sorted(r.ended_s for r in level.replies), level.concurrency - 1
    if len(ends) <= 2 * apart + 1 or not ends[-1]:
        return level.tokens, level.wall_s
    begin, end = ends[apart - 1] if apart else 0.0, ends[-1 - apart]
    arrived = sum(begin < at <= end for r in level.replies for at in r.arrivals_s)
    return arrived, end - begin


def in_force(page: str) -> tuple[str, int]:
    """The arm that the floor has in force ("policy": none), and how often one was, by a page."""
    arm, falls = "policy", 0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "hvd_fallback" and sample.value:
                arm = sample.labels["arm"]
            elif sample.name == "hvd_fallbacks_total":
                falls = int(sample.value)
    return arm, falls


def _plan(tokens: int, crowd: int) -> Plan:
    # A context of this size holds every prompt, and four servers fit in one machine's memory.
    options = chosen(None, None, "127.0.0.1", 0, "auto", ("--max-model-len", "2048"))
    compared = setups(METHODS, [EAGLE3_K], [SUFFIX_K], options.drafter)
    one_each = [s for s in compared if s.padded is not False]
    one_each.sort(key=lambda s: METHODS.index(s.method))
    return Plan(tuple(one_each), options, (1, crowd, 1), (), (), tokens)


def _prompts() -> Iterator[Prompt]:
    for prompt in workloads.interleaved():
        if sum(len(m["content"]) for m in prompt.messages) < LARGEST_PROMPT:
            yield Prompt(prompt.id, prompt.workload, prompt.workload, prompt.messages)


def _send(plan: Plan, server: Server, prompts: Sequence[Prompt], at_once: int) -> Level:
    wall, replies = serve_load.run(server.url, plan.model, prompts, at_once, plan.max_tokens)
    server.check(replies)
    return Level(at_once, wall, tuple(replies), Counters())


def _steps(server: Server) -> int:
    return parse(server.page()).steps
