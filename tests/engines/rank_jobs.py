"""One rank of a few, over gloo: ``python -m tests.engines.rank_jobs JOB RANK SIZE FOLDER``.

Each job writes what its rank saw to ``FOLDER/RANK.json``; the tests compare.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from decoder.engines.vllm.drafter import LateDrafter, guarded
from decoder.engines.vllm.message import INLINE
from decoder.engines.vllm.plan import Plan
from decoder.engines.vllm.ranks import OutOfStep, Ranks
from tests.engines.test_vllm_drafter import Drafter, Server

ROWS = 8
PATIENCE_S = 5.0


def random_plan(rng: np.random.Generator, rows: int) -> Plan:
    """Short drafts, long ones, model drafts and none."""
    lengths = rng.choice([0, 0, 1, 5, INLINE // 2, INLINE], size=rows)
    given = tuple(tuple(rng.integers(0, 150_000, size=n).tolist()) for n in lengths)
    rooms = tuple(int(rng.integers(0, 9)) if not row else 0 for row in given)
    return Plan(given, rooms, int(rng.integers(0, 9)), bool(rng.integers(0, 2)))


def told(plan: Plan) -> list[Any]:
    """A plan as JSON."""
    return [[list(row) for row in plan.given], list(plan.rooms), plan.k, plan.catch_up]


def agreeing(ranks: Ranks) -> dict[str, Any]:
    """Plans of all sizes, some of which rank 0 fails to make, or makes wrongly."""
    rng, plans, made, errors = np.random.default_rng(0), [], [], []
    for step in range(120):
        rows = int(np.random.default_rng(step).integers(0, ROWS + 1))

        def decide(step: int = step, rows: int = rows) -> Plan:
            if step % 7 == 3:
                raise RuntimeError("the policy is broken")
            plan = random_plan(rng, rows + int(step % 7 == 5))  # one row too many
            made.append(told(plan))
            return plan

        try:
            plans.append(told(ranks.agree(rows, decide)))
        except Exception as error:
            errors.append(type(error).__name__)
            made += [told(Plan.nothing(rows))] if step % 7 == 3 else []
            made[-1] = told(Plan.nothing(rows))
            plans.append(made[-1])
    return {"plans": plans, "made": made, "errors": errors}


def drafting(ranks: Ranks) -> dict[str, Any]:
    """Steps of random shape, in which now one rank fails and now another, before its pass."""
    sizes: list[list[int]] = []
    own = Drafter(max_num_tokens=32)
    reads = own.propose

    def one_pass(**arguments: Any) -> torch.Tensor:
        mine = torch.zeros(ranks.size, dtype=torch.int64)
        mine[ranks.rank] = len(arguments["target_token_ids"])
        distributed.all_reduce(mine)
        sizes.append(mine.tolist())
        if broken:
            raise RuntimeError("the same on every rank")
        return reads(**arguments)

    failed = [0]

    def count() -> None:
        failed[0] += 1
        ranks.fell_out()

    own.propose = ranks.passing(one_pass)  # type: ignore[method-assign]
    late = LateDrafter(own, unread=24)
    server = Server(own, late, np.random.default_rng(1), guard=guarded(late, count))
    merged, take_in, widths, complete = late._merged, late._take_in, [], []
    ill = [""]

    def failing(original: Callable[..., Any], where: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if ill[0] == where:
                ill[0] = ""
                raise RuntimeError(f"rank {ranks.rank} fails at {where}")
            return original(*args)

        return call

    late._merged = failing(merged, "merging")  # type: ignore[method-assign]
    late._take_in = failing(take_in, "taking in")  # type: ignore[method-assign]
    rng = np.random.default_rng(2)
    for _step in range(200):
        if len(server.names) < 3 and rng.random() < 0.3:
            server.names.append(str(_step + 1))
        counts = [int(rng.integers(1, 4)) for _ in server.names]
        if counts and rng.random() < 0.1:
            counts[0] = int(rng.integers(5, 20))
        k, who, where = 3 * int(rng.random() < 0.4), int(rng.integers(ranks.size)), rng.random()
        ill[0] = "" if rng.random() > 0.3 or who != ranks.rank else "taking in"
        ill[0] = "merging" if ill[0] and where < 0.6 else ill[0]
        broken = rng.random() < 0.05
        if not counts:
            continue
        full = sum(counts) + late.unread > 24
        given = ((),) * len(counts)
        plan = ranks.agree(
            len(counts), lambda n=len(counts), k=k, f=full, g=given: Plan(g, (k,) * n, k, f)
        )
        before = failed[0]
        drafts = ranks.together(
            bool(plan.k or plan.catch_up),
            lambda c=counts, p=plan: server.step(c, p.k, catch_up=p.catch_up),
        )
        ill[0] = ""
        widths.append(list(drafts.shape))
        well = failed[0] == before
        if well and plan.k:
            complete.append(late.unread)
        if rng.random() < 0.1 and len(server.names) > 1:
            late.forget(server.names.pop(0))
    return {"sizes": sizes, "widths": widths, "failed": failed[0], "unread": complete}


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
    return {"ran": ran, "results": results}


def breaking(ranks: Ranks) -> dict[str, Any]:
    """A fault inside the pass of the last rank alone, halfway through its collectives."""

    def one_pass() -> None:
        distributed.all_reduce(torch.ones(4))
        if ranks.rank == ranks.size - 1:
            raise RuntimeError("out of memory")
        distributed.all_reduce(torch.ones(4), group=device)

    device = distributed.new_group(list(range(ranks.size)), backend="gloo")
    run = ranks.passing(one_pass)
    ranks.agree(1, lambda: Plan(((),), (2,), 2))
    ranks.together(True, run)
    return {"went": "on"}


def astray(ranks: Ranks) -> dict[str, Any]:
    """The last rank believes in another batch than the rest."""
    for step in range(3):
        rows = 2 if step == 2 and ranks.rank == ranks.size - 1 else 1
        ranks.agree(rows, lambda n=rows: Plan.nothing(n))
    ranks.together(True, ranks.passing(lambda: None))
    return {"went": "on"}


JOBS = {job.__name__: job for job in (agreeing, drafting, conducting, breaking, astray)}


def main(job: str, rank: str, size: str, folder: str) -> None:
    """Run one rank of a job."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=int(size)
    )
    ranks = Ranks(int(rank), int(size), distributed.group.WORLD, ROWS, PATIENCE_S)
    result = JOBS[job](ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:5])
    except OutOfStep:
        sys.exit(3)
