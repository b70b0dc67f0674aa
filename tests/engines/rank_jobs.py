"""One rank of a few, over gloo: ``python -m tests.engines.rank_jobs RANK SIZE FOLDER``.

What the rank saw in each job, one after the other, is in ``FOLDER/RANK.json``; the tests compare.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import distributed

from decoder.contracts.errors import EngineError
from decoder.engines.vllm import consistency
from decoder.engines.vllm.ranks import Plan, Ranks

ROWS = 8
PATIENCE_S = 5.0


def random_plan(rng: np.random.Generator, rows: int) -> Plan:
    """Short drafts, long ones, model drafts and none."""
    lengths = rng.choice([0, 0, 1, 5, 128, 256], size=rows)
    drafts = [rng.integers(0, 150_000, size=n).tolist() for n in lengths]
    limits = [int(rng.integers(0, 9)) if not row else 0 for row in drafts]
    return Plan(drafts, limits, int(rng.integers(0, 9)))


def told(plan: Plan) -> list[Any]:
    """A plan as JSON."""
    return list(astuple(plan))


def agreeing(ranks: Ranks) -> dict[str, Any]:
    """Plans of all sizes, some of which rank 0 fails to make, or makes wrongly."""
    rng, plans, errors = np.random.default_rng(0), [], []
    made: list[Any] = []
    for step in range(120):
        rows = int(np.random.default_rng(step).integers(0, ROWS + 1))

        def decide(step: int = step, rows: int = rows) -> Plan:
            if step % 7 == 3:
                raise RuntimeError("the policy is broken")
            plan = random_plan(rng, rows + int(step % 7 == 5))  # one row too many
            made.append(told(plan))
            return plan

        def failed(step: int = step, rows: int = rows) -> None:
            errors.append(type(sys.exc_info()[1]).__name__)
            del made[step:]
            made.append(told(Plan.nothing(rows)))

        plans.append(told(ranks.agree(rows, decide, failed)))
    return {"plans": plans, "made": made, "errors": errors}


def conducting(ranks: Ranks) -> dict[str, Any]:
    """Rank 0 times steps of its own choosing; then a step fails everywhere, then its clock does."""
    ran: list[list[Any]] = []

    def step(n: int) -> None:
        distributed.all_reduce(torch.ones(n))
        ran.append(["step", n])
        if n == 13:
            raise RuntimeError("no such size")

    def draft(n: int) -> None:
        ran.append(["draft", n])

    def measure(*steps: Callable[[int], None]) -> str:
        rng = np.random.default_rng()  # like a clock: nobody else knows what it says
        for n in rng.integers(1, 9, size=int(rng.integers(3, 9))).tolist():
            steps[int(rng.integers(2))](n)
        return "measured"

    def unlucky(*steps: Callable[[int], None]) -> None:
        steps[0](13)

    def clockless(*steps: Callable[[int], None]) -> None:
        raise RuntimeError("no clock")

    results = [ranks.conduct(measure, step, draft)]
    for bad in (unlucky, clockless):
        try:
            results.append(ranks.conduct(bad, step, draft))
        except RuntimeError as error:
            results.append(str(error))
    results.append(ranks.conduct(measure, step, draft))
    told = [ranks.broadcast(ranks.leads), ranks.broadcast(not ranks.leads)]
    return {"ran": ran, "results": results, "told": told}


def astray(ranks: Ranks) -> None:
    """The last rank believes in another batch than the rest."""
    for step in range(1000):
        rows = 2 if step == 2 and ranks.rank == ranks.size - 1 else 1
        ranks.agree(rows, lambda n=rows: Plan.nothing(n))


def meeting(ranks: Ranks) -> dict[str, Any]:
    """The last rank is like the others, or has other settings, or is of another version, or is not
    there; each time in a group of their own."""
    last, told = ranks.rank == ranks.size - 1, {}
    for case in ("alike", "names of its own", "settings", "version", "stock"):
        group = distributed.new_group(list(range(ranks.size)), backend="gloo")
        os.environ |= {"HVD_WORKER_NAME": f"{case} {ranks.rank}" if "names" in case else "worker"}
        os.environ |= {"HVD_WORKER_VARIANTS": "suffix" if last and case == "settings" else "plain"}
        other = last and case == "version"
        consistency.metadata = SimpleNamespace(version=lambda _, o=other: "0.0.1" if o else "0.0.2")
        told[case] = ""
        if case == "stock":
            consistency.TIMEOUT_S = PATIENCE_S  # type: ignore[misc]
            if last:
                continue
        try:
            seat = SimpleNamespace(rank_in_group=ranks.rank, world_size=ranks.size, cpu_group=group)
            consistency.compare_ranks(seat)
        except EngineError as error:
            told[case] = str(error)
    return told


JOBS = (agreeing, conducting, meeting, astray)


def main(rank: str, size: str, folder: str) -> None:
    """Run one rank of all jobs; the last of them ends it."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=int(size)
    )
    result = {}
    for job in JOBS:
        result[job.__name__] = job(Ranks(int(rank), int(size), distributed.group.WORLD))
        Path(folder, f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:4])
