"""One rank of a few, over gloo: ``python -m tests.engines.rank_jobs JOB RANK SIZE FOLDER``.

Each job writes what its rank saw to ``FOLDER/RANK.json``; the tests compare.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import distributed

from decoder.contracts.errors import EngineError
from decoder.engines.vllm import alike
from decoder.engines.vllm.drafter import LateDrafter
from decoder.engines.vllm.message import INLINE
from decoder.engines.vllm.plan import Plan
from decoder.engines.vllm.ranks import Ranks
from tests.engines.test_vllm_drafter import Drafter, Server

ROWS = 8
PATIENCE_S = 5.0


def random_plan(rng: np.random.Generator, rows: int) -> Plan:
    """Short drafts, long ones, model drafts and none."""
    lengths = rng.choice([0, 0, 1, 5, INLINE // 2, INLINE], size=rows)
    given = tuple(tuple(rng.integers(0, 150_000, size=n).tolist()) for n in lengths)
    rooms = tuple(int(rng.integers(0, 9)) if not row else 0 for row in given)
    flags = (rng.integers(0, 2, 2) == 1).tolist()
    return Plan(given, rooms, int(rng.integers(0, 9)), *flags)


def told(plan: Plan) -> list[Any]:
    """A plan as JSON."""
    given, rooms, *rest = astuple(plan)
    return [[list(row) for row in given], list(rooms), *rest]


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
            made.append(told(replace(Plan.nothing(rows), catch_up=True)))

        plans.append(told(ranks.agree(rows, decide, failed)))
    return {"plans": plans, "made": made, "errors": errors}


FULL = 24
"""Tokens set aside at most."""


class Batches:
    """A drafter that reads late on one rank, and notes how much every rank reads in each pass."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sizes: list[list[int]] = []
        self.failed = 0
        self.broken = False
        """Whether the coming pass fails, on all ranks."""
        self.ill = ""
        """Where this rank alone fails next."""
        drafter = Drafter(max_num_tokens=32)
        self._reads = drafter.propose
        drafter.propose = ranks.passing(self._pass)  # type: ignore[method-assign]
        self.late = LateDrafter(drafter, unread=1000)
        self.server = Server(drafter, self.late, np.random.default_rng(1))
        self._propose = self.late.propose
        self.late.propose = self._guarded  # type: ignore[method-assign]
        for where in ("_merged", "_take_in"):
            setattr(self.late, where, self._failing(where, getattr(self.late, where)))

    def step(self, counts: list[int], k: int) -> list[int]:
        """One step of the engine; the shape of its drafts."""
        rows = len(counts)
        full = sum(counts) + self.late.unread > FULL
        plan = self.ranks.agree(rows, lambda: Plan(((),) * rows, (k,) * rows, k, full))
        drafts = self.ranks.together(
            bool(plan.k or plan.catch_up), lambda: self.server.step(counts, plan.k, plan.catch_up)
        )
        return list(drafts.shape)

    def leave(self, names: set[str]) -> None:
        """Requests end between two steps, and what was set aside for them is read."""
        if self.ranks.uneven():
            self.late.clear()
        try:
            self.ranks.together(self.late.holds(names), lambda: self.late.leave(names))
        except Exception:  # noqa: BLE001 - any fault of a drafter
            self.failed += 1
            self.late.clear()

    def _pass(self, **arguments: Any) -> torch.Tensor:
        mine = torch.zeros(self.ranks.size, dtype=torch.int64)
        mine[self.ranks.rank] = len(arguments["target_token_ids"])
        distributed.all_reduce(mine)
        self.sizes.append(mine.tolist())
        if self.broken:
            raise RuntimeError("the same on every rank")
        return self._reads(**arguments)

    def _guarded(self, **arguments: Any) -> torch.Tensor:
        """As the adapter guards it."""
        try:
            return self._propose(**arguments)
        except Exception:  # noqa: BLE001 - any fault of a drafter
            self.failed += 1
            self.late.clear()
            self.ranks.fell_out()
            return torch.empty((len(self.late.names), 0), dtype=torch.int64)

    def _failing(self, where: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.ill == where:
                self.ill = ""
                raise RuntimeError(f"rank {self.ranks.rank} fails at {where}")
            return original(*arguments)

        return call


def drafting(ranks: Ranks) -> dict[str, Any]:
    """Steps of random shape, in which now one rank fails outside a pass, now all fail inside."""
    batches, rng = Batches(ranks), np.random.default_rng(2)
    names, widths, unread = batches.server.names, [], []
    for number in range(300):
        if len(names) < 3 and rng.random() < 0.3:
            names.append(str(number + 1))
        counts = [int(rng.integers(1, 4)) for _ in names]
        if counts and rng.random() < 0.1:
            counts[0] = int(rng.integers(5, 20))
        k, ends = 3 * int(rng.random() < 0.4), rng.random() < 0.1
        where = str(rng.choice(["", "", "", "_merged", "_take_in"]))
        batches.ill = where if int(rng.integers(ranks.size)) == ranks.rank else ""
        batches.broken = rng.random() < 0.05
        if counts:
            widths.append(batches.step(counts, k))
        if ends and names:
            batches.leave({names.pop(0)})
        batches.ill, batches.broken = "", False
        unread.append(batches.late.unread)
    batches.step([1] * len(names), 1)  # whoever has dropped something says so now
    batches.step([1] * len(names), 1)
    unread.append(batches.late.unread)
    return {
        "sizes": batches.sizes, "widths": widths, "failed": batches.failed, "unread": unread,
    }  # fmt: skip


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


def meeting(ranks: Ranks) -> dict[str, Any]:
    """The last rank is like the others, or has other settings, or is of another version, or is not
    there; each time in a group of their own."""
    last, told = ranks.rank == ranks.size - 1, {}
    alike.PATIENCE_S = PATIENCE_S  # type: ignore[misc]
    for case in ("alike", "names of its own", "settings", "version", "stock"):
        group = distributed.new_group(list(range(ranks.size)), backend="gloo")
        os.environ |= {"HVD_WORKER_NAME": f"{case} {ranks.rank}" if "names" in case else "worker"}
        os.environ |= {"HVD_WORKER_SIDES": "suffix" if last and case == "settings" else "plain"}
        other = last and case == "version"
        alike.metadata = SimpleNamespace(version=lambda _, o=other: "0.0.1" if o else "0.0.2")
        told[case] = ""
        if last and case == "stock":
            continue
        try:
            seat = SimpleNamespace(rank_in_group=ranks.rank, world_size=ranks.size, cpu_group=group)
            alike.meet(seat)
        except EngineError as error:
            told[case] = str(error)
    return told


JOBS = {job.__name__: job for job in (agreeing, drafting, conducting, breaking, astray, meeting)}


def main(job: str, rank: str, size: str, folder: str) -> None:
    """Run one rank of a job."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=int(size)
    )
    ranks = Ranks(int(rank), int(size), distributed.group.WORLD, ROWS, PATIENCE_S)
    result = JOBS[job](ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    while not all(Path(folder, f"{other}.json").exists() for other in range(int(size))):
        time.sleep(0.02)
    # Taking gloo down now and then ends a process ("terminate called without an active exception"),
    # and what is looked at is over: nobody waits for a message any more.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:5])
