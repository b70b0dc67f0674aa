"""Tensor-parallel ranks: rank 0 decides and broadcasts its plan, the others follow it.

Every rank runs the same step on its part of the weights, and each pass of the model drafter
consists of collectives. Ranks that disagree on a pass would wait for each other for ever, or reduce
unrelated tensors. So only rank 0 has the router, with its policies, caches and telemetry. It
broadcasts one :class:`Plan` a step, by which all run the drafter, in a message of fixed length, so
that ranks which disagree on the batch can detect it; a second one holds what does not fit. A rank
that fails in it ends its process, and vLLM then ends the engine: the other ranks cannot know how
far it came.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import numpy as np
import torch
from torch import distributed

log = logging.getLogger(__name__)

T = TypeVar("T")

_STOP: Final = -1
INLINE: Final = 2048
"""Bytes of a plan in the first message: most plans, and still one packet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The drafts of one step, by rows of the batch.

    ``cached`` are the cache drafts; a row without one proposes at most ``limits`` tokens of the
    model's draft. The model drafter makes ``k`` tokens.
    """

    cached: list[list[int]]
    limits: list[int]
    k: int = 0

    @classmethod
    def nothing(cls, rows: int) -> Plan:
        """No drafts."""
        return cls([[] for _ in range(rows)], [0] * rows)

    def spread(self, rows: Sequence[int], size: int) -> Plan:
        """This plan, whose rows are ``rows`` of a batch of ``size``; others draft nothing."""
        if len(rows) == size:
            return self
        plan = Plan.nothing(size)
        cached, limits = list(plan.cached), list(plan.limits)
        for row, tokens, limit in zip(rows, self.cached, self.limits, strict=True):
            cached[row], limits[row] = tokens, limit
        return Plan(cached, limits, self.k)

    def lengths(self) -> list[int]:
        """Length of each row's draft, if the model drafter makes ``k`` tokens."""
        return [
            len(cached) or min(limit, self.k)
            for cached, limit in zip(self.cached, self.limits, strict=True)
        ]

    def proposals(self, from_model: Sequence[list[int]]) -> list[list[int]]:
        """Each row's draft. ``from_model`` are the drafter's, by rows; the last may be missing."""
        rows = [*from_model, *[[]] * (len(self.cached) - len(from_model))]
        return [
            cached or model[:limit]
            for cached, limit, model in zip(self.cached, self.limits, rows, strict=False)
        ]


class Ranks:
    """One rank's view of its tensor-parallel group; a single rank sends nothing."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        """``group`` is a process group for CPU tensors, of ``size`` ranks in the same order."""
        self.rank, self.size, self._group = rank, size, group
        self._message = np.zeros(12 + INLINE, np.uint8)
        self._header = self._message[:12].view(np.int32)  # step, rows, bytes of the plan
        self._step = 0

    @property
    def leads(self) -> bool:
        """Whether this rank decides: it has the router."""
        return self.rank == 0

    def agree(
        self, rows: int, decide: Callable[[], Plan], failed: Callable[[], None] = lambda: None
    ) -> Plan:
        """The plan of this step, the same on all ranks. On rank 0 ``decide`` makes it, or
        ``failed`` is called while its exception is handled, and the step drafts nothing. Ends the
        process where the ranks are at different steps, or cannot communicate."""
        self._step += 1
        if not self.leads:
            return self._received(rows)
        try:
            plan = decide()
            if len(plan.cached) != rows:
                raise ValueError(f"a plan of {len(plan.cached)} rows for a step of {rows}.")
        except Exception:  # noqa: BLE001 - ``failed`` logs it
            failed()
            plan = Plan.nothing(rows)
        if self.size > 1:
            encoded = np.frombuffer(bytearray(msgspec.msgpack.encode(plan)), np.uint8)
            self._header[:] = self._step, rows, len(encoded)
            self._message[12:][: len(encoded)] = encoded[:INLINE]
            self._broadcast(torch.from_numpy(self._message))
            if len(encoded) > INLINE:
                self._broadcast(torch.from_numpy(encoded[INLINE:]))
        return plan

    def conduct(self, measure: Callable[..., T], *steps: Callable[[int], Any]) -> T | None:
        """The result of ``measure(*steps)`` on rank 0, whose clock decides; other ranks run the
        same steps, each with a number of tokens or rows, and return None.

        Raises:
            Exception: on rank 0, raised by ``measure`` or a step. Other ranks log theirs and wait
                for the next order: either every rank failed, or there is no further order.
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

    def broadcast(self, flag: bool) -> bool:
        """Broadcast rank 0's ``flag``; the others' are ignored."""
        order = torch.tensor([flag], dtype=torch.int32)
        self._broadcast(order)
        return bool(order)

    def end(self, why: str) -> NoReturn:
        """End this process, and the engine with it; an exception being handled is logged."""
        # vLLM only logs an exception of a rank other than the first, and would go on without it.
        log.critical(
            "rank %d of %d ends, and the engine with it: %s", self.rank, self.size, why,
            exc_info=sys.exc_info()[1],
        )  # fmt: skip
        logging.shutdown()
        # On an exception vLLM would first destroy its process groups, where gloo waits for the
        # collective that never ends.
        os._exit(1)

    def _received(self, rows: int) -> Plan:
        self._broadcast(torch.from_numpy(self._message))
        *sent, size = self._header.tolist()
        if sent != (own := [self._step, rows]):
            self.end(f"rank 0 is at (step, requests) {tuple(sent)}, and not at {tuple(own)}.")
        encoded = np.empty(size, np.uint8)
        encoded[:INLINE] = self._message[12:][:size]
        if size > INLINE:
            self._broadcast(torch.from_numpy(encoded[INLINE:]))
        return msgspec.msgpack.decode(encoded.data, type=Plan)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.size == 1:
            return
        try:
            distributed.broadcast(tensor, group=self._group, group_src=0)
        except RuntimeError as error:
            self.end(f"the ranks cannot reach each other ({error}).")
