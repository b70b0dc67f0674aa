"""Deferred drafter prefill: vLLM's EAGLE3 drafter runs only before it drafts.

vLLM runs the drafter in every step, if only to fill its KV cache: a tenth of a step on a small
model. Here its inputs are set aside. One pass prefills them when a draft is wanted, when too many
have gathered, or when a request ends or loses its blocks, which a later prompt may reuse. Each
token is still prefilled once, with its hidden state of the target, so drafts are the same; and they
are verified whatever the drafter's cache holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from decoder.core.guards.prefill_budget import PrefillBudget
from decoder.engines.vllm.v1.coverage import PrefillCoverage

if TYPE_CHECKING:
    from decoder.core.router import DraftRouter

MAX_DEFERRED: Final = 128
"""Most deferred tokens: their hidden states stay in memory, and prefilling them takes time."""
MANY: Final = 32
"""Deferred tokens that make the time of the step which prefills them no measure of costs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request that the target has run: a range of a step's ``ids``, int32 [tokens],
    and ``hidden`` [tokens, width], whose first token has that ``position`` in the request."""

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
        ids, hidden = (t[self.start : self.stop].clone() for t in (self.ids, self.hidden))
        return Piece(ids, hidden, 0, len(self), self.position)


class DeferredDrafter:
    """Wraps ``propose`` of one of vLLM's EAGLE3 drafters; for unpadded batches only.

    The calls of a step: :meth:`release`, ``coverage.schedule``, :meth:`admit`, :meth:`prepare`,
    :meth:`propose`.
    """

    def __init__(
        self, drafter: Any, budget: PrefillBudget | None = None, shares_blocks: bool = True
    ) -> None:
        """Defer the prefill of vLLM's ``drafter``. ``budget`` decides whether new requests are
        prefilled (None: always); ``shares_blocks``: whether others may reuse an ended request's
        blocks (prefix caching)."""
        self.coverage = PrefillCoverage(drafter)
        self.unable: Collection[str] = ()
        """Requests of the step without drafter prefill, for which it makes no drafts."""
        self.deferred = 0
        """Deferred tokens."""
        self.prefilled = 0
        """Deferred tokens of earlier steps that were prefilled since the last step's own."""
        self._drafter, self._propose, self._budget = drafter, drafter.propose, budget
        self._shares_blocks = shares_blocks
        self._most = min(MAX_DEFERRED, drafter.max_num_tokens)
        self._reads_layers = bool(getattr(drafter, "eagle3_use_aux_hidden_state", True))
        self._names: Sequence[str] = ()  # of the step, in the order of the batch
        self._full = False  # whether this step's tokens exceed the limit of deferred ones
        self._prefill_now = False  # whether all deferred tokens must be prefilled
        self._pieces: dict[str, list[Piece]] = {}
        # To prefill a request's pieces after its last batch: its blocks in it, int32 [n], and the
        # token after its last piece, int32 [].
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        self._batch: Any = None  # attention metadata of the last step, and other arguments
        self._kwargs: dict[str, Any] = {}

    def release(self, names: Collection[str], active: bool) -> None:
        """Forget requests that ended or lost their blocks. Unknown names are ignored.

        Call it before the step in which others may write to these blocks. Where others may share
        them, and drafting is ``active``, the requests' deferred tokens are prefilled first.

        Raises:
            Exception: that failed; all deferred tokens are dropped.
        """
        try:
            if names and active and self._shares_blocks:
                self._prefill(names)
        except Exception:
            self.clear(missed=True)
            raise
        finally:
            for name in names:
                self._drop(name)
                self.coverage.forget(name)

    def admit(self, names: Sequence[str], scheduled: Mapping[str, int]) -> None:
        """Decide which new requests of a step the drafter prefills: ``names`` in the order of the
        batch, with those that end, whose blocks a later prompt may reuse; ``scheduled`` tokens."""
        self._names = names
        self.coverage.admit(names, self._budget is None or self._budget.allows)
        self.unable = self.coverage.skipped.intersection(names)
        tokens = sum(scheduled[name] for name in names if name not in self.unable)
        self._full = self.deferred + tokens > self._most

    def prepare(
        self, ended: Collection[str] | None, tokens: int, router: DraftRouter | None
    ) -> None:
        """Decide whether the step, of so many tokens, prefills all deferred ones, and update the
        budget. ``ended`` are the requests that ended with it; None if unknown."""
        leaving = ended is None or any(name not in self.unable for name in ended)
        self._prefill_now = self.coverage.reuses_blocks or self._full or leaving
        if router is not None and self._budget is not None and router.model_gain_us is not None:
            table = router.costs.table
            plain_us = table.time(len(self._names))
            self._budget.observe(tokens, table.slope, router.model_gain_us, plain_us)

    def clear(self, missed: bool = False) -> None:
        """Drop all deferred tokens. Where the drafter ``missed`` them, running requests are skipped
        from now on, and their blocks count as without prefill."""
        if missed:
            self.coverage.skip_all()
        self._pieces.clear()
        self._rows.clear()
        self.deferred = 0

    def _drop(self, name: str) -> None:
        """Drop a request's deferred tokens. Unknown names are ignored."""
        self.deferred -= sum(map(len, self._pieces.pop(name, ())))
        self._rows.pop(name, None)

    @torch.inference_mode()
    def _prefill(self, names: Collection[str]) -> None:
        """Prefill the deferred tokens of requests that are in no later batch."""
        leaving = [name for name in self._pieces if name in names]
        if not leaving:
            return
        pieces = [self._pieces[name] for name in leaving]
        blocks, following = zip(*(self._rows[name] for name in leaving), strict=True)
        self._merged(pieces, torch.stack(blocks), torch.stack(following), 0)
        self.prefilled += sum(len(piece) for row in pieces for piece in row)

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
        batch, names = common_attn_metadata, self._names
        self._batch, self._kwargs = batch, kwargs
        latest = self._defer(target_token_ids, target_hidden_states, batch)
        self.prefilled = 0
        if not num_speculative_tokens and not (self._prefill_now and self.deferred):
            table = batch.block_table_tensor[: len(names)].clone()  # a view of a reused buffer
            for name, blocks, token in zip(names, table, next_token_ids, strict=False):
                if name in self._pieces:
                    self._rows[name] = blocks, token
            return next_token_ids.new_empty((len(names), 0), dtype=torch.int64)
        pieces = [self._pieces.get(name) or [_last_of(latest[name])] for name in names]
        for name in names:
            self._drop(name)
        earlier = [row for row, own in enumerate(pieces) if len(own) > 1]
        if not earlier and [len(own[0]) for own in pieces] == [*map(len, latest.values())]:
            step = target_token_ids, target_positions, target_hidden_states
            return self._run(step, next_token_ids, batch, num_speculative_tokens)
        table = batch.block_table_tensor
        self.prefilled = sum(len(piece) for row in earlier for piece in pieces[row][:-1])
        if earlier and self.prefilled + len(target_token_ids) > self._drafter.max_num_tokens:
            # With a step full of prompts, all exceed the drafter's buffers: two passes.
            now = [pieces[row][-1] for row in earlier]
            following = torch.stack([piece.ids[piece.start] for piece in now])
            before = [pieces[row][:-1] for row in earlier]
            self._merged(before, table[earlier], following, 0)
            pieces = [own[-1:] for own in pieces]
        return self._merged(pieces, table, next_token_ids, num_speculative_tokens)

    def _defer(self, ids: Tensor, hidden: Tensor, batch: Any) -> dict[str, Piece]:
        """Defer this step's tokens, except of skipped requests; returns each request's piece of
        the step."""
        ids, skipped = ids.clone(), self.coverage.skipped  # a view of a reused buffer
        if not self._reads_layers:  # likewise; states of several layers are in a new tensor
            hidden = hidden.clone()
        starts = batch.query_start_loc_cpu.tolist()
        ends = batch.seq_lens_cpu_upper_bound.tolist()
        latest: dict[str, Piece] = {}
        for i, name in enumerate(self._names):
            start, stop = starts[i], starts[i + 1]
            latest[name] = Piece(ids, hidden, start, stop, ends[i] - (stop - start))
        # A view would keep the hidden states of skipped prompts in memory.
        copies = not skipped.isdisjoint(latest)
        for name, piece in latest.items():
            if name in skipped:
                continue
            row = self._pieces.get(name, [])
            if row and row[-1].end != piece.position:
                self._drop(name)
                row = _before(row, piece.position)
                self.deferred += sum(map(len, row))
            self._pieces[name] = [*row, piece.copied() if copies else piece]
            self.deferred += len(piece)
        return latest

    def _merged(
        self, rows: Sequence[Sequence[Piece]], table: Tensor, following: Tensor, draft: int
    ) -> Tensor:
        """Prefill several pieces of each row in one pass, then draft. ``table`` is int32 [rows or
        more, blocks of a request]; ``following`` int32 [rows], the token after each row's last."""
        batch = self._batch
        device, size = batch.query_start_loc.device, self._drafter.block_size
        counts = np.array([sum(map(len, row)) for row in rows], np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        firsts = np.array([row[0].position for row in rows])
        in_request = np.arange(starts[-1]) - np.repeat(starts[:-1] - firsts, counts)
        row_of = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device)
        positions = torch.from_numpy(in_request).to(device)
        blocks = table[row_of, positions // size].long()
        start_cpu = torch.from_numpy(starts.astype(np.int32))
        lengths = torch.tensor([row[-1].end for row in rows], dtype=torch.int32)
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
        return self._run((ids, positions, hidden), following, merged, draft)

    def _run(
        self, step: tuple[Tensor, Tensor, Tensor], following: Tensor, batch: Any, draft: int
    ) -> Tensor:
        """Run vLLM's drafter on token ids, positions and hidden states."""
        # vLLM increments both lengths with each token it drafts. On a CPU they are one tensor:
        # chains would attend to positions never written, and near the end of the context read
        # beyond the block table, which ends the engine.
        batch.seq_lens_cpu_upper_bound = batch.seq_lens_cpu_upper_bound.clone()
        ids, positions, hidden = step
        drafts: Tensor = self._propose(
            num_speculative_tokens=draft,
            target_token_ids=ids,
            target_positions=positions,
            target_hidden_states=hidden,
            next_token_ids=following,
            common_attn_metadata=batch,
            **self._kwargs,
        )
        return drafts


def _last_of(piece: Piece) -> Piece:
    """The last token alone."""
    return replace(piece, start=piece.stop - 1, position=piece.end - 1)


def _before(row: Sequence[Piece], position: int) -> list[Piece]:
    """The pieces of ``row`` that stay deferred if its request resumes at ``position``.

    A preempted request resumes after the prefix of it that is still cached; the target runs the
    tokens after that again. No piece stays where tokens are missing before ``position``.
    """
    if position > row[-1].end:
        return []
    pieces = [piece for piece in row if piece.position < position]
    return [replace(p, stop=min(p.stop, p.start + position - p.position)) for p in pieces]
