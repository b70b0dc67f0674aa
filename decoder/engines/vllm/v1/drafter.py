"""vLLM's EAGLE3 drafter, reading what was committed only when it is going to draft.

vLLM runs the drafter in every step, if only to keep its KV cache in step with the target's: a tenth
of a step on a small model. Here what it would have read is set aside, and read in one pass when a
draft is wanted, when too much has gathered, or when a request ends or loses its blocks (they may
serve a later prompt). Each token is still read once, with the hidden state the target gave it, so
drafts are the same; and whatever a drafter's cache holds, drafts are verified. What a request says
that is skipped is not read (``reading`` says when), and nothing is drafted for it, nor for one that
begins in blocks which were not read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from decoder.engines.vllm.v1.prefill_budget import SAMPLE

UNREAD: Final = 128
"""Tokens set aside at most: their hidden states stay in memory, and reading them takes time."""
SEEDS: Final = 0.5
"""Share of requests that begin in others' blocks, from which on one that does not is always read:
what it says will be begun with, and would stay unread for as long as it is cached."""
RECENT: Final = 1 / 8
"""Weight of one request in that share."""
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

    @property
    def end(self) -> int:
        """Position in its request behind the last token."""
        return self.position + len(self)

    def copied(self) -> Piece:
        """The same in tensors of its own."""
        part = slice(self.start, self.stop)
        return replace(
            self, ids=self.ids[part].clone(), hidden=self.hidden[part].clone(),
            start=0, stop=len(self),
        )  # fmt: skip

    def end_alone(self) -> Piece:
        """Its last token."""
        return replace(self, start=self.stop - 1, position=self.end - 1)


class LateDrafter:
    """Stands before the ``propose`` of one of vLLM's EAGLE3 drafters, unpadded batches only.

    ``names`` are the requests of the coming call, in the batch's order, and ``catch_up`` says
    whether it must leave nothing unread; both are set before it, and :meth:`meet` is told of them.
    """

    def __init__(self, drafter: Any, unread: int = UNREAD) -> None:
        self.names: Sequence[str] = ()
        self.catch_up = False
        self.skipped: set[str] = set()
        """Requests that are not read."""
        self.unread = 0
        """Tokens set aside."""
        self.caught_up = 0
        """Tokens of earlier steps that were read since the last step's own."""
        self._drafter, self._propose = drafter, drafter.propose
        self._most = min(unread, drafter.max_num_tokens)
        self._reads_layers = bool(getattr(drafter, "eagle3_use_aux_hidden_state", True))
        self._pieces: dict[str, list[Piece]] = {}
        self._places: dict[str, tuple[Tensor, Tensor]] = {}
        """What it takes to read a request's pieces when it is in no batch any more: its blocks
        int32 [n] as they were at the last one, and the token int32 [] behind that."""
        self._last: tuple[Any, dict[str, Any]] | None = None  # of the last step set aside
        self._met: set[str] = set()
        self._read_blocks: set[int] = set()  # of which the last to write there is, or was, read
        self._blocks: dict[str, list[int]] = {}  # of each request, in its order
        self._begins: dict[str, int] = {}  # how many of them were others' before
        self._new: dict[str, int] = {}  # of those with blocks not judged yet: how many were
        self._shared = 1.0  # of the requests that begin, those that do so in others' blocks
        self._passed_by = 0  # requests, since one was read that would have been skipped

    def scheduled(self, output: Any) -> None:
        """Take in which blocks a step gives to which requests, in the scheduler's order; ``output``
        is its own. To be told of every step, before :meth:`meet`."""
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
                held = self._blocks.setdefault(name, [])
                self._new.setdefault(name, len(held))
                held += blocks[group]

    def _begin(self, name: str, blocks: Sequence[int], computed: int) -> None:
        self._blocks[name] = list(blocks)
        self._begins[name] = self._new[name] = computed // self._drafter.block_size

    def meet(self, names: Sequence[str], reads: bool) -> None:
        """Decide which of a step's requests that begin with it are read: all if it ``reads``, else
        one in ``SAMPLE``. None is that begins in blocks which were not read."""
        fresh = dict.fromkeys(name for name in names if name not in self._met)
        # As the scheduler took them: one may begin in what another says in the same step.
        for name in [*(n for n in self._new if n in fresh), *(fresh.keys() - self._new.keys())]:
            blocks, begins = self._blocks.get(name, []), self._begins.get(name)
            read = self._read_blocks.issuperset(blocks[:begins])
            if read and not reads and (begins != 0 or self._shared < SEEDS):
                self._passed_by = (self._passed_by + 1) % SAMPLE
                read = not self._passed_by
            self._met.add(name)
            if not read:
                self.skipped.add(name)
            self._write(name)
            if begins is not None:
                self._shared += ((begins > 0) - self._shared) * RECENT
        for name in self._met.intersection(self._new):
            self._write(name)

    def _write(self, name: str) -> None:
        """Note whether what a request writes to its new blocks is read."""
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
        """Drop what was set aside for a request. Unknown names are ignored."""
        self.unread -= sum(len(piece) for piece in self._pieces.pop(name, ()))
        self._places.pop(name, None)

    def full(self, tokens: int) -> bool:
        """Whether so many more would be more than may wait."""
        return bool(self.unread + tokens > self._most)

    def clear(self, missed: bool = False) -> None:
        """Drop all that was set aside. Where it was ``missed``, requests under way are read no
        more, and what they said counts as unread.
        """
        for name in self._met - self.skipped if missed else ():
            own = self._blocks.get(name, [])[self._begins.get(name, 0) :]
            self._read_blocks.difference_update(own)
            self.skipped.add(name)
        self._pieces.clear()
        self._places.clear()
        self.unread = 0

    def leave(self, names: Collection[str]) -> None:
        """Read what was set aside for requests that have ended or lost their blocks.

        To be called before the step in which those blocks may serve others: later, what is written
        there is theirs. Unknown names are ignored; a fault loses what was set aside for them.
        """
        gone = [name for name in self._pieces if name in names]
        if not gone or self._last is None:
            return
        rows = [self._pieces[name] for name in gone]
        blocks, following = zip(*(self._places[name] for name in gone), strict=True)
        for name in gone:
            self.forget(name)
        batch, rest = self._last
        self._merged(
            batch,
            rows,
            torch.stack(blocks),
            [row[-1].end for row in rows],
            torch.stack(following),
            0,
            rest,
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
        **rest: Any,
    ) -> Tensor:
        """Draft tokens [requests, num_speculative_tokens], as the drafter's own method."""
        batch, names = common_attn_metadata, self.names
        latest = self._take_in(target_token_ids, target_hidden_states, batch)
        self.caught_up = 0
        if not num_speculative_tokens and not (self.catch_up and self.unread):
            table = batch.block_table_tensor[: len(names)].clone()  # a view likewise
            for name, blocks, token in zip(names, table, next_token_ids, strict=False):
                if name in self._pieces:
                    self._places[name] = blocks, token
            self._last = batch, rest
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
                num_speculative_tokens, rest,
            )  # fmt: skip
        waiting = sum(len(piece) for _, row, _ in earlier for piece in row)
        self.caught_up = waiting
        if earlier and waiting + len(target_token_ids) > self._drafter.max_num_tokens:
            # A step full of prompts leaves no room in the drafter's buffers: two passes.
            following = torch.stack([now.ids[now.start] for _, _, now in earlier])
            before = [now.position for _, _, now in earlier]
            table = batch.block_table_tensor[[i for i, _, _ in earlier]]
            self._merged(batch, [row for _, row, _ in earlier], table, before, following, 0, rest)
            rows = [row[-1:] for row in rows]
        return self._merged(
            batch, rows, batch.block_table_tensor, [row[-1].end for row in rows], next_token_ids,
            num_speculative_tokens, rest,
        )  # fmt: skip

    def _take_in(self, ids: Tensor, hidden: Tensor, batch: Any) -> dict[str, Piece]:
        """Set this step's tokens aside, behind what is unread of their requests, but for those that
        are skipped; what each request has of the step."""
        ids = ids.clone()  # a view of a buffer that the next step overwrites
        if not self._reads_layers:  # likewise: of several layers vLLM makes a tensor of its own
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
            # beside a prompt that is skipped it would keep all of that in memory
            piece = latest[name] if self.skipped.isdisjoint(latest) else latest[name].copied()
            row = self._pieces.get(name, [])
            if row and row[-1].end != piece.position:
                self.forget(name)
                row = _before(row, piece.position)
                self.unread += sum(len(kept) for kept in row)
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
        rest: dict[str, Any],
    ) -> Tensor:
        """Read several pieces of each row in one pass.

        Args:
            batch: attention metadata of any step, for its kind and device.
            table: int32 [rows or more, blocks of a request].
        """
        device = batch.query_start_loc.device
        counts = np.array([sum(len(piece) for piece in row) for row in rows], np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        firsts = np.array([row[0].position for row in rows])
        places = np.arange(starts[-1]) - np.repeat(starts[:-1] - firsts, counts)
        owners = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device)
        positions = torch.from_numpy(places).to(device)
        size = self._drafter.block_size
        blocks = table[owners, positions // size].long()
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
        return self._read(ids, positions, hidden, following, merged, draft, rest)

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
        # vLLM counts both up with each token it drafts, and on a CPU they are one tensor: chains
        # would attend to places that were never written, and near the end of the context read
        # behind the block table, which ends the engine.
        batch.seq_lens_cpu_upper_bound = batch.seq_lens_cpu_upper_bound.clone()
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


def _before(row: Sequence[Piece], position: int) -> list[Piece]:
    """What of ``row`` still waits if its request goes on at ``position``.

    A preempted request comes back to the part of itself that is still in the cache; what lies
    behind is read again. Nothing waits where something in between was never here.
    """
    if position > row[-1].end:
        return []
    kept = [piece for piece in row if piece.position < position]
    return [replace(p, stop=min(p.stop, p.start + position - p.position)) for p in kept]
