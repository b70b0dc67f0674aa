"""A drafter that reads late reads the same: every token once, in order, where it belongs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from decoder.engines.vllm.v1.drafter import LateDrafter

BLOCK = 4
BLOCKS = 64
WIDTH = 3


@dataclass
class Batch:
    """The fields of vLLM's attention metadata that a drafter's first pass uses."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    dcp_local_seq_lens: None = None


@dataclass
class Drafter:
    """Writes into its cache what it reads, slot by slot, as EAGLE's first pass would."""

    max_num_tokens: int = 256
    block_size: int = BLOCK
    eagle3_use_aux_hidden_state: bool = False
    cache: dict[int, tuple[int, float]] = field(default_factory=dict)
    passes: int = 0

    def propose(
        self,
        *,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        common_attn_metadata: Batch,
    ) -> torch.Tensor:
        batch, self.passes = common_attn_metadata, self.passes + 1
        starts = batch.query_start_loc.tolist()
        assert len(target_token_ids) == starts[-1] == batch.num_actual_tokens <= self.max_num_tokens
        assert batch.query_start_loc_cpu.tolist() == starts and batch.num_reqs == len(starts) - 1
        counts = np.diff(starts)
        assert batch.max_query_len >= counts.max() and min(counts) > 0
        following = target_token_ids.roll(-1)
        following[batch.query_start_loc[1:].long() - 1] = next_token_ids
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            length = int(batch.seq_lens[row])
            places = target_positions[start:stop].tolist()
            assert places == list(range(length - (stop - start), length))
            for i, place in zip(range(start, stop), places, strict=True):
                slot = int(batch.slot_mapping[i])
                block = int(batch.block_table_tensor[row, place // BLOCK])
                assert slot == block * BLOCK + place % BLOCK
                self.cache[slot] = int(following[i]), float(target_hidden_states[i].sum())
        lengths = batch.seq_lens.clone()
        for _ in range(num_speculative_tokens - 1):  # as vLLM goes on from a token it drafted
            batch.seq_lens += 1
            batch.seq_lens_cpu_upper_bound += 1
            lengths += 1
            assert batch.seq_lens.equal(lengths), "it would attend to what was never written"
        return torch.zeros(batch.num_reqs, num_speculative_tokens, dtype=torch.int64)


@dataclass
class Server:
    """Requests at random positions, in steps of random shape: what vLLM hands to a drafter."""

    drafter: Drafter
    late: LateDrafter
    rng: np.random.Generator
    read: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def token(self, name: str, place: int) -> int:
        return int(name) * 1000 + place

    def hidden(self, name: str, place: int) -> float:
        return float(int(name) * 7 + place / 8)

    def step(self, counts: list[int], draft: int = 0) -> torch.Tensor:
        rows = list(zip(self.names, counts, strict=True))
        before = {name: self.read.get(name, 0) for name, _ in rows}
        at = [(n, p) for n, c in rows for p in range(before[n], before[n] + c)]
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        ends = torch.tensor([before[n] + c for n, c in rows], dtype=torch.int32)
        table = torch.tensor(
            [[(int(n) * BLOCKS + b) for b in range(BLOCKS)] for n, _ in rows], dtype=torch.int32
        )
        slots = torch.tensor([(int(n) * BLOCKS + p // BLOCK) * BLOCK + p % BLOCK for n, p in at])
        ids = torch.tensor([self.token(n, p) for n, p in at], dtype=torch.int32)
        batch = Batch(  # on a CPU what is on the host and on the device is one tensor
            starts, starts, ends, ends, len(rows), len(at), max(counts), int(ends.max()),
            table, slots,
        )  # fmt: skip
        self.late.names = self.names
        self.late.catch_up = self.late.full(sum(counts))
        states = torch.tensor([[self.hidden(n, p)] * WIDTH for n, p in at]) / WIDTH
        drafts = self.late.propose(
            num_speculative_tokens=draft,
            target_token_ids=ids,
            target_positions=torch.tensor([p for _, p in at]),
            target_hidden_states=states[: len(at)],  # of a graph, which writes there again
            next_token_ids=torch.tensor(
                [self.token(n, before[n] + c) for n, c in rows], dtype=torch.int32
            ),
            common_attn_metadata=batch,
        )
        ids.zero_()  # vLLM's buffers hold the next step's tokens by then
        states.zero_()
        for n, c in rows:
            self.read[n] = before[n] + c
        return drafts

    def complete(self) -> bool:
        """Whether the cache holds every token that the requests have read, and each rightly."""
        for name in self.names:
            for place in range(self.read[name]):
                slot = (int(name) * BLOCKS + place // BLOCK) * BLOCK + place % BLOCK
                found = self.drafter.cache.get(slot)
                if found is None or found[0] != self.token(name, place + 1):
                    return False
                if found[1] != pytest.approx(self.hidden(name, place), rel=1e-5):
                    return False
        return True


def server(unread: int = 24, capacity: int = 256, seed: int = 0) -> Server:
    drafter = Drafter(max_num_tokens=capacity)
    return Server(drafter, LateDrafter(drafter, unread), np.random.default_rng(seed))


@pytest.mark.parametrize(("seed", "capacity"), [*((n, 256) for n in range(5)), (5, 32), (6, 32)])
def test_whenever_it_drafts_it_has_read_everything_once(seed: int, capacity: int) -> None:
    """With little room a step full of prompts is read after what waits."""
    s = server(capacity=capacity, seed=seed)
    passes = 0
    for number in range(120):
        if len(s.names) < 4 and s.rng.random() < 0.2:
            s.names.append(str(number + 1))
        if not s.names:
            continue
        counts = [int(s.rng.integers(1, 4)) for _ in s.names]
        if s.rng.random() < 0.1:
            counts[int(s.rng.integers(len(counts)))] = int(s.rng.integers(5, 20))
        draft = 3 * int(s.rng.random() < 0.15)
        passes += 1
        assert s.step(counts, draft).shape == (len(s.names), draft)
        assert s.complete() or not draft
        assert s.late.unread <= 24
        long = [n for n in s.names if s.read[n] > 200]
        if long or s.rng.random() < 0.05:
            gone = (long or s.names)[0]
            s.names.remove(gone)
            s.late.forget(gone)
    assert s.drafter.passes < 0.5 * passes


@pytest.mark.parametrize("again", [0, 4, 6])
def test_a_preempted_request_goes_on_in_what_is_left_of_it(again: int) -> None:
    """Tokens before ``again`` are still in the target's cache, unread by the drafter."""
    s = server()
    s.names = ["1"]
    s.step([6])
    s.step([1])
    s.read["1"] = again
    s.step([9 - again])
    assert s.late.unread == 9
    s.step([1], draft=1)
    assert s.complete()


def test_a_gap_is_not_read_over() -> None:
    s = server()
    s.names = ["1"]
    s.step([6])
    s.read["1"] = 8  # what lies between came from elsewhere
    s.step([2])
    assert s.late.unread == 2
    assert s.step([1], draft=1).shape == (1, 1)


def test_what_a_request_leaves_is_read_before_others_share_its_blocks() -> None:
    """A stop string or a client ends it between two steps, when it is in no batch any more."""
    s = server()
    s.names = ["1", "2", "3"]
    s.step([5, 2, 7])
    s.step([1, 1, 3])
    s.late.leave({"3", "1", "unknown"})
    assert s.drafter.passes == 1 and s.late.unread == 3
    assert s.late.caught_up == 5 + 1 + 7 + 3
    s.names = ["1", "3"]
    assert s.complete()
    s.late.leave({"3", "1"})
    assert s.drafter.passes == 1
    s.names = ["2"]
    assert not s.complete()
    s.step([1], draft=2)
    assert s.complete() and s.late.caught_up == 3
