"""Several ranks of one engine: rank 0 decides, the others draft what it decided.

Under tensor parallelism every rank runs the same step on its part of the weights, and each pass of
the model drafter is made of collectives: ranks that do not agree on a pass wait for each other for
ever, or add up what does not belong together. So one rank has the router, with its policies, caches
and telemetry, and a step goes like this:

==================  ==============================================================================
``agree``           rank 0 decides, one broadcast tells the rest: a :class:`Plan`
``together``        each rank runs the drafter as planned
``passing``         before each of the drafter's passes all vote: where one cannot, none does
==================  ==============================================================================

What goes wrong outside a pass costs the step its model drafts, on all ranks. A fault inside a pass
is survived where every rank has it; where only some do, collectives are left half done, and the
rank ends its process: vLLM then ends the engine, instead of answering wrongly or never.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import torch
from torch import distributed

from decoder.engines.vllm.message import message_for, missing, place, read, write
from decoder.engines.vllm.plan import Plan

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S: Final = 60.0
"""How long a vote waits for the slowest rank. vLLM itself gives a step 300 s."""
_STOP: Final = -1


class OutOfStep(Exception):
    """Some rank cannot run this pass, so no rank does: the step goes on without model drafts."""


class Ranks:
    """The ranks of one tensor-parallel group, as one of them sees them; alone, it sends nothing."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: Any = None, most_rows: int = 0,
        patience: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        """Join the others; nothing is sent yet.

        Args:
            group: a process group for CPU tensors, of ``size`` ranks in the same order.
            most_rows: requests of a batch at most.
            patience: seconds a vote waits for the slowest rank.
        """
        self.rank, self.size, self._group = rank, size, group
        self._patience = timedelta(seconds=patience)
        self._message = message_for(most_rows)
        self._tensor = torch.from_numpy(self._message)
        self._step = 0
        self._due = False  # whether this step runs a pass, for which the others await a vote
        self._told = False  # whether they know of this step's fault
        self._lost = False  # whether this rank's drafter has missed what the others' have read

    @property
    def leads(self) -> bool:
        """Whether this rank decides, and is the one that has the router."""
        return self.rank == 0

    def agree(
        self, rows: int, decide: Callable[[], Plan], failed: Callable[[], None] = lambda: None
    ) -> Plan:
        """The plan of this step, the same on all ranks.

        Args:
            decide: makes a plan of so many rows; runs on rank 0 alone.
            failed: told, while the exception is handled, that it made none. The step then drafts
                nothing, and reads what was set aside: nobody else would see to that.

        Ends the process where the ranks are not at the same step, or out of reach of each other.
        """
        self._step += 1
        if not self.leads:
            return self._received(rows)
        try:
            plan = decide()
            rest = write(self._message, self._step, rows, plan) if self.size > 1 else ()
        except Exception:  # noqa: BLE001 - told by the caller
            failed()
            plan = replace(Plan.nothing(rows), catch_up=True)
            rest = write(self._message, self._step, rows, plan) if self.size > 1 else ()
        self._broadcast(self._tensor)
        if len(rest):
            self._broadcast(torch.from_numpy(rest))
        return plan

    def together(self, due: bool, draft: Callable[[], T]) -> T:
        """Run the drafting of this step.

        Args:
            due: whether it runs a pass of the model drafter; the same on all ranks.

        Raises:
            OutOfStep: some rank could not begin a pass.
            Exception: what ``draft`` raised on this rank; the others were told.
        """
        self._due, self._told = due and self.size > 1, False
        try:
            return draft()
        except Exception:
            self.fell_out()
            raise
        finally:
            self._due = False

    def uneven(self) -> bool:
        """Whether some rank has dropped what others have set aside; asked by all, then all drop it.

        For passes whose need each rank finds in what it has set aside, and no plan tells.
        """
        if self.size == 1:
            return False
        lost, self._lost = self._lost, False
        return bool(self._vote(out=int(lost)))

    def fell_out(self) -> None:
        """This rank's drafter has failed, and dropped what was set aside: all shall do so.

        For whoever catches the fault below ``together``; said twice it counts once.
        """
        if self._told or self.size == 1:
            return
        if self._due:
            self._told = True
            self._vote(out=1)
        else:
            self._lost = True  # said at the next pass

    def passing(self, run: Callable[..., T]) -> Callable[..., T]:
        """``run``, one pass of the drafter, for when all ranks can run it."""
        if self.size == 1:
            return run

        def passed(*args: Any, **kwargs: Any) -> T:
            if self._due:
                lost, self._lost = self._lost, False
                out = self._vote(out=int(lost))
                if out:
                    self._told = True
                    raise OutOfStep(f"{out} of {self.size} ranks cannot run the model drafter.")
            return self._inside(lambda: run(*args, **kwargs))

        return passed

    def conduct(self, measure: Callable[..., T], *steps: Callable[[int], None]) -> T | None:
        """``measure(*steps)`` on rank 0, whose clock decides what to run; the rest run the same.

        Args:
            steps: each runs so many tokens or rows on this rank.

        Returns:
            What ``measure`` returned; None on the other ranks.

        Raises:
            Exception: what ``measure`` or a step raised, on rank 0; the rest log theirs.
        """
        if self.size == 1:
            return measure(*steps)
        order = torch.zeros(2, dtype=torch.int32)

        def ordered(index: int, n: int) -> None:
            order[0], order[1] = index, n
            self._broadcast(order)
            self._inside(lambda: steps[index](n))

        if self.leads:
            try:
                return measure(*(partial(ordered, index) for index in range(len(steps))))
            finally:
                self._broadcast(order.fill_(_STOP))
        while True:
            self._broadcast(order)
            index, n = order.tolist()
            if index == _STOP:
                return None
            try:
                self._inside(partial(steps[index], n))
            except Exception:  # every rank had it, and rank 0 says when to stop
                log.exception("rank %d cannot run a step of %d", self.rank, n)

    def end(self, why: str) -> NoReturn:
        """End this process, and the engine with it; an exception being handled is logged."""
        # vLLM only logs what a rank other than the first raises, and would go on without it.
        log.critical(
            "rank %d of %d ends, and the engine with it: %s", self.rank, self.size, why,
            exc_info=sys.exc_info()[1],
        )  # fmt: skip
        logging.shutdown()
        # Leaving by an exception, vLLM would first take its process groups down, and gloo waits in
        # there for the collective that never ends.
        os._exit(1)

    def _received(self, rows: int) -> Plan:
        self._broadcast(self._tensor)
        if place(self._message) != (self._step, rows):
            there, here = place(self._message), (self._step, rows)
            self.end(f"rank 0 is at (step, requests) {there}, and not at {here}.")
        rest = np.empty(missing(self._message), np.int32)
        if len(rest):
            self._broadcast(torch.from_numpy(rest))
        return read(self._message, rest)

    def _inside(self, run: Callable[[], T]) -> T:
        """Run what is made of collectives; a fault leaves it only where every rank has one."""
        try:
            return run()
        except Exception:
            self._told = True
            self._vote(inside=1)
            raise

    def _vote(self, out: int = 0, inside: int = 0) -> int:
        """How many ranks are out, after all have said where they are."""
        votes = torch.tensor([self._step, out, inside], dtype=torch.int64)
        try:
            work = distributed.all_reduce(votes, group=self._group, async_op=True)
            work.wait(self._patience)
        except RuntimeError as error:
            self.end(f"a rank is not at the pass the others are at ({error}).")
        steps, outside, failed = votes.tolist()
        if steps != self._step * self.size or failed not in (0, self.size):
            self.end(f"{failed} ranks failed inside a pass that the others went on with.")
        return int(outside)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.size == 1:
            return
        try:
            distributed.broadcast(tensor, group=self._group, group_src=0)
        except RuntimeError as error:
            self.end(f"the ranks cannot reach each other ({error}).")
