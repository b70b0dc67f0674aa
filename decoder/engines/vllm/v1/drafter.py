"""Deferred drafter prefill: vLLM's EAGLE3 drafter runs only before it drafts.

vLLM runs the drafter in every step, if only to fill its KV cache: a tenth of a step on a small
model. Here its inputs are set aside. One pass prefills them when a draft is wanted, when too many
have gathered, or when a request ends or loses its blocks, which a later prompt may reuse. Each
token is still prefilled once, with its hidden state of the target, so drafts are the same; and they
are verified whatever the drafter's cache holds. A skipped request (see ``prefill_budget``) is not
prefilled and gets no model drafts, nor does one that begins with shared blocks without prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from decoder.core.guards.prefill_budget import SAMPLE

UNREAD: Final = 128
"""Most deferred tokens: their hidden states stay in memory, and prefilling them takes time."""
SEEDS: Final = 0.5
"""Share of requests that begin with shared blocks, from which on those without shared blocks are
always prefilled: others will share their blocks, for as long as these are cached."""
RECENT: Final = 1 / 8
"""Weight of the newest request in that share."""
MUCH: Final = 32
"""Deferred tokens that make the time of the step which prefills them no measure of costs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request that the target has run: a range of a step's tensors.

    ``ids`` int32 [tokens of the step] and ``hidden`` [tokens of the step, width] are the whole
    step's; ``position`` is the position of the range's first token in its request.
    """

    ids: Tensor
    hidden: Tensor
    start: int
    stop: int
    position: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Position in its request after the last token."""
        return self.position + len(self)

    def copied(self) -> Piece:
        """A copy with its own tensors."""
        part = slice(self.start, self.stop)
        return replace(
            self, ids=self.ids[part].clone(), hidden=self.hidden[part].clone(),
            start=0, stop=len(self),
        )  # fmt: skip

    def end_alone(self) -> Piece:
        """The last token alone."""
        return replace(self, start=self.stop - 1, position=self.end - 1)


class LateDrafter:
    """Wraps ``propose`` of one of vLLM's EAGLE3 drafters; for unpadded batches only.

    Set before each call: ``names``, the requests in the order of the batch, also passed to
    :meth:`meet`; and ``catch_up``, whether the call must prefill all deferred tokens.
    """

    def __init__(self, drafter: Any, unread: int = UNREAD) -> None:
        self.names: Sequence[str] = ()
        self.catch_up = False
        self.skipped: set[str] = set()
        """Requests without drafter prefill."""
        self.unread = 0
        """Deferred tokens."""
        self.caught_up = 0
        """Deferred tokens of earlier steps that were prefilled since the last step's own."""
        self._drafter, self._propose = drafter, drafter.propose
        self._most = min(unread, drafter.max_num_tokens)
        self._reads_layers = bool(getattr(drafter, "eagle3_use_aux_hidden_state", True))
        self._pieces: dict[str, list[Piece]] = {}
        self._places: dict[str, tuple[Tensor, Tensor]] = {}
        """To prefill a request's pieces after its last batch: its blocks in it, int32 [n], and the
        token after its last piece, int32 []."""
        self._last: tuple[Any, dict[str, Any]] | None = None  # arguments of the last deferred step
        self._met: set[str] = set()
        self._read_blocks: set[int] = set()  # blocks whose last writer has drafter prefill
        self._blocks: dict[str, list[int]] = {}  # of each request, in its order
        self._begins: dict[str, int] = {}  # number of shared blocks that a request begins with
        self._new: dict[str, int] = {}  # index of a request's first block not in _read_blocks yet
        self._shared = 1.0  # share of new requests that begin with shared blocks
        self._skips = 0  # requests skipped since the last sampled one

    def scheduled(self, output: Any) -> None:
        """Record the blocks that a step's ``SchedulerOutput`` gives to requests. Call it for every
        step, before :meth:`meet`."""
        group = max(getattr(self._drafter, "kv_cache_gid", 0), 0)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids[group], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._begin(name, blocks[group], computed)
            elif blocks is not None:
                known = self._blocks.setdefault(name, [])
                self._new.setdefault(name, len(known))
                known += blocks[group]

    def _begin(self, name: str, blocks: Sequence[int], computed: int) -> None:
        self._blocks[name] = list(blocks)
        self._begins[name] = self._new[name] = computed // self._drafter.block_size

    def meet(self, names: Sequence[str], reads: bool) -> None:
        """Decide which new requests of a step the drafter prefills: all if it ``reads``, else one
        in ``SAMPLE``; never one that begins with shared blocks without prefill."""
        fresh = dict.fromkeys(name for name in names if name not in self._met)
        # In the scheduler's order: one may share blocks of another in the same step.
        for name in [*(n for n in self._new if n in fresh), *(fresh.keys() - self._new.keys())]:
            blocks, begins = self._blocks.get(name, []), self._begins.get(name)
            read = self._read_blocks.issuperset(blocks[:begins])
            if read and not reads and (begins != 0 or self._shared < SEEDS):
                self._skips = (self._skips + 1) % SAMPLE
                read = not self._skips
            self._met.add(name)
            if not read:
                self.skipped.add(name)
            self._write(name)
            if begins is not None:
                self._shared += ((begins > 0) - self._shared) * RECENT
        for name in self._met.intersection(self._new):
            self._write(name)

    def _write(self, name: str) -> None:
        """Record whether a request's new blocks have drafter prefill."""
        if (begin := self._new.pop(name, None)) is not None:
            blocks = self._read_blocks
            change = blocks.difference_update if name in self.skipped else blocks.update
            change(self._blocks[name][begin:])

    def end(self, name: str) -> None:
        """Forget a request that ended or lost its blocks. Unknown names are ignored."""
        self.forget(name)
        self._met.discard(name)
        self.skipped.discard(name)
        blocks = self._blocks.pop(name, [])
        self._read_blocks.difference_update(blocks[self._new.pop(name, len(blocks)) :])
        self._begins.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop a request's deferred tokens. Unknown names are ignored."""
        self.unread -= sum(len(piece) for piece in self._pieces.pop(name, ()))
        self._places.pop(name, None)

    def full(self, tokens: int) -> bool:
        """Whether ``tokens`` more would exceed the limit of deferred tokens."""
        return bool(self.unread + tokens > self._most)

    def clear(self, missed: bool = False) -> None:
        """Drop all deferred tokens. Where the drafter ``missed`` them, running requests are skipped
        from now on, and their blocks count as without prefill.
        """
        for name in self._met - self.skipped if missed else ():
            unshared = self._blocks.get(name, [])[self._begins.get(name, 0) :]
            self._read_blocks.difference_update(unshared)
            self.skipped.add(name)
        self._pieces.clear()
        self._places.clear()
        self.unread = 0

    def leave(self, names: Collection[str]) -> None:
        """Prefill the deferred tokens of requests that ended or lost their blocks.

        Call it before the step in which others may write to these blocks. Unknown names are
        ignored; a fault loses the requests' deferred tokens.
        """
        leaving = [name for name in self._pieces if name in names]
        if not leaving or self._last is None:
            return
        rows = [self._pieces[name] for name in leaving]
        blocks, following = zip(*(self._places[name] for name in leaving), strict=True)
        for name in leaving:
            self.forget(name)
        batch, kwargs = self._last
        self._merged(
            batch,
            rows,
            torch.stack(blocks),
            [row[-1].end for row in rows],
            torch.stack(following),
            0,
            kwargs,
        )
        self.caught_up += sum(len(piece) for row in rows for piece in row)

    def propose(
        self,
        *,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        common_attn_metadata: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Draft tokens [requests, num_speculative_tokens], as the drafter's own method."""
        batch, names = common_attn_metadata, self.names
        latest = self._defer(target_token_ids, target_hidden_states, batch)
        self.caught_up = 0
        if not num_speculative_tokens and not (self.catch_up and self.unread):
            table = batch.block_table_tensor[: len(names)].clone()  # a view of a reused buffer
            for name, blocks, token in zip(names, table, next_token_ids, strict=False):
                if name in self._pieces:
                    self._places[name] = blocks, token
            self._last = batch, kwargs
            return next_token_ids.new_empty((len(names), 0), dtype=torch.int64)
        rows = [self._pieces.get(name) or [latest[name].end_alone()] for name in names]
        for name in names:
            self.forget(name)
        earlier = [(i, row[:-1], row[-1]) for i, row in enumerate(rows) if len(row) > 1]
        if not earlier and all(
            len(row[0]) == len(latest[n]) for n, row in zip(names, rows, strict=True)
        ):
            return self._read(
                target_token_ids, target_positions, target_hidden_states, next_token_ids, batch,
                num_speculative_tokens, kwargs,
            )  # fmt: skip
        waiting = sum(len(piece) for _, row, _ in earlier for piece in row)
        self.caught_up = waiting
        if earlier and waiting + len(target_token_ids) > self._drafter.max_num_tokens:
            # With a step full of prompts, all exceed the drafter's buffers: two passes.
            following = torch.stack([now.ids[now.start] for _, _, now in earlier])
            before = [now.position for _, _, now in earlier]
            table = batch.block_table_tensor[[i for i, _, _ in earlier]]
            self._merged(batch, [row for _, row, _ in earlier], table, before, following, 0, kwargs)
            rows = [row[-1:] for row in rows]
        return self._merged(
            batch, rows, batch.block_table_tensor, [row[-1].end for row in rows], next_token_ids,
            num_speculative_tokens, kwargs,
        )  # fmt: skip

    def _defer(self, ids: Tensor, hidden: Tensor, batch: Any) -> dict[str, Piece]:
        """Defer this step's tokens, except of skipped requests; returns each request's piece of
        the step."""
        ids = ids.clone()  # a view of a buffer that the next step overwrites
        if not self._reads_layers:  # likewise; states of several layers are in a new tensor
            hidden = hidden.clone()
        starts = batch.query_start_loc_cpu.tolist()
        ends = batch.seq_lens_cpu_upper_bound.tolist()
        latest: dict[str, Piece] = {}
        for i, name in enumerate(self.names):
            start, stop = starts[i], starts[i + 1]
            latest[name] = Piece(ids, hidden, start, stop, ends[i] - (stop - start))
        for name in self.names:
            if name in self.skipped:
                continue
            # A view would keep the hidden states of skipped prompts in memory.
            piece = latest[name] if self.skipped.isdisjoint(latest) else latest[name].copied()
            row = self._pieces.get(name, [])
            if row and row[-1].end != piece.position:
                self.forget(name)
                row = _before(row, piece.position)
                self.unread += sum(len(earlier) for earlier in row)
            self._pieces[name] = [*row, piece]
            self.unread += len(piece)
        return latest

    def _merged(
        self,
        batch: Any,
        rows: Sequence[Sequence[Piece]],
        table: Tensor,
        ends: Sequence[int],
        following: Tensor,
        draft: int,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Prefill several pieces of each row in one pass.

        Args:
            batch: attention metadata of any step, for its kind and device.
            table: int32 [rows or more, blocks of a request].
        """
        device = batch.query_start_loc.device
        counts = np.array([sum(len(piece) for piece in row) for row in rows], np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        firsts = np.array([row[0].position for row in rows])
        in_request = np.arange(starts[-1]) - np.repeat(starts[:-1] - firsts, counts)
        row_of = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device)
        positions = torch.from_numpy(in_request).to(device)
        size = self._drafter.block_size
        blocks = table[row_of, positions // size].long()
        start_cpu = torch.from_numpy(starts.astype(np.int32))
        lengths = torch.tensor(ends, dtype=torch.int32)
        merged = type(batch)(
            query_start_loc=start_cpu.to(device),
            query_start_loc_cpu=start_cpu,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=blocks * size + positions % size,
            causal=True,
            dcp_local_seq_lens=batch.dcp_local_seq_lens,
        )
        pieces = [piece for row in rows for piece in row]
        ids = torch.cat([p.ids[p.start : p.stop] for p in pieces])
        hidden = torch.cat([p.hidden[p.start : p.stop] for p in pieces])
        return self._read(ids, positions, hidden, following, merged, draft, kwargs)

    def _read(
        self,
        ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        following: Tensor,
        batch: Any,
        draft: int,
        kwargs: dict[str, Any],
    ) -> Tensor:
        # vLLM increments both lengths with each token it drafts. On a CPU they are one tensor:
        # chains would attend to positions never written, and near the end of the context read
        # beyond the block table, which ends the engine.
        batch.seq_lens_cpu_upper_bound = batch.seq_lens_cpu_upper_bound.clone()
        drafts: Tensor = self._propose(
            num_speculative_tokens=draft,
            target_token_ids=ids,
            target_positions=positions,
            target_hidden_states=hidden,
            next_token_ids=following,
            common_attn_metadata=batch,
            **kwargs,
        )
        return drafts


def _before(row: Sequence[Piece], position: int) -> list[Piece]:
    """The pieces of ``row`` that stay deferred if its request resumes at ``position``.

    A preempted request resumes after the prefix of it that is still cached; the target runs the
    tokens after that again. No piece stays where tokens are missing before ``position``.
    """
    if position > row[-1].end:
        return []
    pieces = [piece for piece in row if piece.position < position]
    return [replace(p, stop=min(p.stop, p.start + position - p.position)) for p in pieces]
