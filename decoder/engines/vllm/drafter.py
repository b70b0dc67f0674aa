"""vLLM's EAGLE3 drafter, reading what was committed only when it is going to draft.

vLLM runs the drafter in every step, if only to keep its KV cache in step with the target's: a tenth
of a step on a small model. Here what it would have read is set aside, and read in one pass when a
draft is wanted, when too much has gathered, or when a request ends (its blocks may serve a later
prompt). Each token is still read once, with the hidden state the target gave it, so drafts are the
same; and whatever a drafter's cache holds, drafts are verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

UNREAD: Final = 128
"""Tokens set aside at most: their hidden states stay in memory, and reading them takes time."""
MUCH: Final = 32
"""Tokens of earlier steps that make the step in which they are read unlike others."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request that the target has read: a range of a step's tensors.

    ``ids`` int32 [step's tokens] and ``hidden`` [step's tokens, width] are the whole step's;
    ``position`` is that of the first token of the range in its request.
    """

    ids: Tensor
    hidden: Tensor
    start: int
    stop: int
    position: int

    def __len__(self) -> int:
        return self.stop - self.start


class LateDrafter:
    """Stands before the ``propose`` of one of vLLM's EAGLE3 drafters, unpadded batches only.

    ``names`` are the requests of the coming call, in the batch's order, and ``catch_up`` says
    whether it must leave nothing unread; both are set before it.
    """

    def __init__(self, drafter: Any, unread: int = UNREAD) -> None:
        self.names: Sequence[str] = ()
        self.catch_up = False
        self.unread = 0
        """Tokens set aside."""
        self.caught_up = 0
        """Tokens of earlier steps that the last call read."""
        self._drafter, self._propose, self._most = drafter, drafter.propose, unread
        self._pieces: dict[str, list[Piece]] = {}

    def forget(self, name: str) -> None:
        """Drop what was set aside for a request. Unknown names are ignored."""
        self.unread -= sum(len(piece) for piece in self._pieces.pop(name, ()))

    def clear(self) -> None:
        """Drop all that was set aside."""
        self._pieces.clear()
        self.unread = 0

    def propose(
        self,
        *,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        common_attn_metadata: Any,
        **rest: Any,
    ) -> Tensor:
        """Draft tokens [requests, num_speculative_tokens], as the drafter's own method."""
        batch, names = common_attn_metadata, self.names
        self._take_in(target_token_ids, target_hidden_states, batch)
        self.caught_up = 0
        if not num_speculative_tokens and not self.catch_up and self.unread <= self._most:
            return next_token_ids.new_empty((len(names), 0), dtype=torch.int64)
        rows = [self._pieces.pop(name) for name in names]
        self.unread -= sum(len(piece) for row in rows for piece in row)
        earlier = [(i, row[:-1], row[-1]) for i, row in enumerate(rows) if len(row) > 1]
        if not earlier:
            return self._read(
                target_token_ids, target_positions, target_hidden_states, next_token_ids, batch,
                num_speculative_tokens, rest,
            )  # fmt: skip
        waiting = sum(len(piece) for _, row, _ in earlier for piece in row)
        self.caught_up = waiting
        if waiting + len(target_token_ids) > self._drafter.max_num_tokens:
            # A step full of prompts leaves no room in the drafter's buffers: two passes.
            chosen = [i for i, _, _ in earlier]
            following = torch.stack([now.ids[now.start] for _, _, now in earlier])
            before = [now.position for _, _, now in earlier]
            self._merged([row for _, row, _ in earlier], chosen, before, following, batch, 0, rest)
            rows = [row[-1:] for row in rows]
        ends = [row[-1].position + len(row[-1]) for row in rows]
        return self._merged(
            rows, range(len(rows)), ends, next_token_ids, batch, num_speculative_tokens, rest
        )

    def _take_in(self, ids: Tensor, hidden: Tensor, batch: Any) -> None:
        """Set this step's tokens aside, behind what is unread of their requests."""
        ids = ids.clone()  # a view of a buffer that the next step overwrites
        starts = batch.query_start_loc_cpu.tolist()
        ends = batch.seq_lens_cpu_upper_bound.tolist()
        for i, name in enumerate(self.names):
            start, stop = starts[i], starts[i + 1]
            piece = Piece(ids, hidden, start, stop, ends[i] - (stop - start))
            row = self._pieces.get(name, [])
            if row and row[-1].position + len(row[-1]) != piece.position:
                self.forget(name)  # it was preempted, and its prompt is read again
                row = []
            self._pieces[name] = [*row, piece]
            self.unread += len(piece)

    def _merged(
        self,
        rows: Sequence[Sequence[Piece]],
        chosen: Sequence[int],
        ends: Sequence[int],
        following: Tensor,
        batch: Any,
        draft: int,
        rest: dict[str, Any],
    ) -> Tensor:
        """Read several pieces of each of the ``chosen`` rows of ``batch`` in one pass."""
        device = batch.query_start_loc.device
        counts = np.array([sum(len(piece) for piece in row) for row in rows], np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        firsts = np.array([row[0].position for row in rows])
        places = np.arange(starts[-1]) - np.repeat(starts[:-1] - firsts, counts)
        owners = torch.from_numpy(np.repeat(np.array(chosen), counts)).to(device)
        positions = torch.from_numpy(places).to(device)
        size = self._drafter.block_size
        blocks = batch.block_table_tensor[owners, positions // size].long()
        start_cpu = torch.from_numpy(starts.astype(np.int32))
        lengths = torch.tensor(ends, dtype=torch.int32)
        table = batch.block_table_tensor
        merged = type(batch)(
            query_start_loc=start_cpu.to(device),
            query_start_loc_cpu=start_cpu,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table if len(rows) == len(table) else table[list(chosen)],
            slot_mapping=blocks * size + positions % size,
            causal=True,
            dcp_local_seq_lens=batch.dcp_local_seq_lens,
        )
        pieces = [piece for row in rows for piece in row]
        return self._read(
            torch.cat([p.ids[p.start : p.stop] for p in pieces]),
            positions,
            torch.cat([p.hidden[p.start : p.stop] for p in pieces]),
            following,
            merged,
            draft,
            rest,
        )

    def _read(
        self,
        ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        following: Tensor,
        batch: Any,
        draft: int,
        rest: dict[str, Any],
    ) -> Tensor:
        drafts: Tensor = self._propose(
            num_speculative_tokens=draft,
            target_token_ids=ids,
            target_positions=positions,
            target_hidden_states=hidden,
            next_token_ids=following,
            common_attn_metadata=batch,
            **rest,
        )
        return drafts


def guarded(late: LateDrafter, failed: Callable[[], None]) -> Callable[..., Tensor]:
    """``late.propose``, except that a fault costs the step its model drafts and nothing else.

    What was set aside is dropped then: later drafts of running requests miss that text and may be
    worse, and are verified like all others. ``failed`` is told.
    """

    def propose(*, next_token_ids: Tensor, **arguments: Any) -> Tensor:
        try:
            return late.propose(next_token_ids=next_token_ids, **arguments)
        except Exception:
            log.exception("the model drafter failed: this step goes on without its drafts")
            late.clear()
            failed()
            return next_token_ids.new_empty((len(late.names), 0), dtype=torch.int64)

    return propose
