"""Several ranks of one engine: rank 0 decides, the others draft what it decided.

Under tensor parallelism every rank runs the same step on its part of the weights, and each pass of
the model drafter is made of collectives: ranks that do not agree on a pass wait for each other for
ever, or add up what does not belong together. So one rank has the router, with its policies, caches
and telemetry, and one broadcast tells the rest its :class:`Plan` for each step, by which all run
the drafter. Where that fails on a rank, the rank ends its process, and vLLM then ends the engine,
as it does by itself: nobody else knows how far the rank came.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import torch
from torch import distributed

from decoder.engines.vllm.plan import HEADER, INLINE, Plan, read, write

log = logging.getLogger(__name__)

T = TypeVar("T")

_STOP: Final = -1


class Ranks:
    """The ranks of one tensor-parallel group, as one of them sees them; alone, it sends nothing."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, most_rows: int = 0) -> None:
        """Join the others; nothing is sent yet.

        Args:
            group: a process group for CPU tensors, of ``size`` ranks in the same order.
            most_rows: requests of a batch at most.
        """
        self.rank, self.size, self._group = rank, size, group
        self._message = np.zeros(HEADER + most_rows + INLINE, np.int32)
        self._tensor = torch.from_numpy(self._message)
        self._step = 0

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
            failed: told, while the exception is handled, that it made none: the step then drafts
                nothing.

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
            plan = Plan.nothing(rows)
            rest = write(self._message, self._step, rows, plan) if self.size > 1 else ()
        self._broadcast(self._tensor)
        if len(rest):
            self._broadcast(torch.from_numpy(rest))
        return plan

    def conduct(self, measure: Callable[..., T], *steps: Callable[[int], Any]) -> T | None:
        """``measure(*steps)`` on rank 0, whose clock decides what to run; the rest run the same.

        Args:
            steps: each runs so many tokens or rows on this rank; ``measure`` gets what rank 0's
                returns.

        Returns:
            What ``measure`` returned; None on the other ranks.

        Raises:
            Exception: what ``measure`` or a step raised, on rank 0. The rest log theirs, and await
                its next order: every rank had it, or none ever comes.
        """
        if self.size == 1:
            return measure(*steps)
        order = torch.zeros(2, dtype=torch.int32)

        def ordered(index: int, n: int) -> Any:
            order[0], order[1] = index, n
            self._broadcast(order)
            return steps[index](n)

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
                steps[index](n)
            except Exception:
                log.exception("rank %d cannot run a step of %d", self.rank, n)

    def told(self, flag: bool) -> bool:
        """What rank 0 says, whatever the others do."""
        order = torch.tensor([flag], dtype=torch.int32)
        self._broadcast(order)
        return bool(order)

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
        *there, _, count = self._message[:HEADER].tolist()
        if there != (here := [self._step, rows]):
            self.end(f"rank 0 is at (step, requests) {tuple(there)}, and not at {tuple(here)}.")
        rest = np.empty(max(count - INLINE, 0), np.int32)
        if len(rest):
            self._broadcast(torch.from_numpy(rest))
        return read(self._message, rest)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.size == 1:
            return
        try:
            distributed.broadcast(tensor, group=self._group, group_src=0)
        except RuntimeError as error:
            self.end(f"the ranks cannot reach each other ({error}).")
