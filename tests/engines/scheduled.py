"""vLLM's own scheduler and block tables around our adapter; the target is a list of tokens.

Everything is as in an engine but for the two networks: the target commits what a script says, the
drafter writes down what it reads, slot by slot, and drafts what the script says or something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decoder.contracts.settings import KafkaSettings
from decoder.core.costs import LiveCosts
from decoder.core.guards.prefill_budget import PrefillBudget
from decoder.engines.vllm.adapter import Adapter
from decoder.engines.vllm.requirements import longest_draft, within
from decoder.engines.vllm.v1 import runner as v1
from decoder.engines.vllm.v1.drafter import DeferredDrafter
from decoder.settings import WorkerSettings
from decoder.worker import Worker, make_worker
from tests.decoder.simulated import trusting_policy
from tests.engines.plugged import keep_events

BLOCK = 4
WIDTH = 3
VOCABULARY = 64


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


class Grammar:
    """Stands where vLLM validates drafts: lets the first ``most`` tokens of a draft through."""

    def __init__(self) -> None:
        self.most = 10_000

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        return tokens[: self.most]

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return True

    def should_advance(self, request: Any) -> bool:
        return False


@dataclass
class Scheduled:
    """An engine without networks.

    ``script`` gives the whole text of a request, prompt and output, by name; ``right`` how many
    tokens of a model draft are the script's.
    """

    config: Any
    script: Callable[[str], Sequence[int]]
    right: int = 2
    blocks: int = 400
    deferring: bool = True
    capacity: int = 256  # tokens of the drafter's buffers
    budget: PrefillBudget | None = None
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.config.cache_config.num_gpu_blocks = self.blocks
        self.config.cache_config.block_size = BLOCK
        group = KVCacheGroupSpec(["target", "drafter"], spec, is_eagle_group=self.has_model)
        self.grammar = Grammar()
        self.scheduler = self.scheduler_class(
            self.config, KVCacheConfig(self.blocks, [], [group]), self.grammar, BLOCK,
            log_stats=True,
        )  # fmt: skip
        asked = WorkerSettings(telemetry=False, metrics=False, floor=False)
        settings = within(self.config, asked)
        longest = longest_draft(self.config)
        classes = np.zeros((VOCABULARY, 10), np.float32)
        self.worker = make_worker(
            settings, KafkaSettings(), "scope", classes, self.has_model, longest=longest
        )
        self.ring = keep_events(self.worker)
        self.worker.router.policy = trusting_policy()
        self.worker.router.costs = LiveCosts(live=False)  # of no time that passes here
        self.drafter = Drafter(self.capacity)
        defers = self.has_model and self.deferring
        deferred = DeferredDrafter(self.drafter, self.budget) if defers else None
        self.adapter = Adapter(self.worker, longest, has_model=self.has_model, deferred=deferred)
        self.propose = v1.propose
        self.draft = (deferred or self.drafter).propose
        self.runner = SimpleNamespace(
            requests={},
            input_batch=SimpleNamespace(
                req_ids=[],
                vocab_size=VOCABULARY,
                token_ids_cpu=np.zeros((0, 0), np.int32),
                num_tokens_no_spec=np.zeros(0, np.int32),
            ),
            max_model_len=self.config.model_config.max_model_len,
            effective_drafter_max_model_len=self.config.model_config.max_model_len,
            device=torch.device("cpu"),
            scheduler_config=copy(self.config.scheduler_config),
        )
        self.longest_seen = 0
        self.prompts: dict[str, list[int]] = {}
        self.read: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.stats: list[Any] = []
        self.told: list[tuple[str, int, int]] = []  # request, tokens drafted, really verified
        self.placeholders = 0  # drafts that vLLM kept places for and nobody made
        self.preemptions = 0
        self._waiting: dict[str, int] = {}

    @property
    def has_model(self) -> bool:
        return bool(self.config.speculative_config.method == "eagle3")

    @property
    def scheduler_class(self) -> Any:
        """The scheduler that there is for such an engine."""
        from vllm.v1.core.sched.scheduler import Scheduler

        return Scheduler

    def ask(self, name: str, prompt: int, most: int, **parameters: Any) -> None:
        """Add a request: the first ``prompt`` tokens of its script, ``most`` tokens to write."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        asked = SamplingParams(temperature=0, max_tokens=most, **parameters)
        text = list(self.script(name))
        request = Request(name, text[:prompt], asked, None, block_hasher=self.hasher)
        self.outputs[name], self.prompts[name] = [], text[:prompt]
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """End a request as a client that goes away does, or the front end at a stop string."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.finished[name] = "abort"

    def run(self, steps: int = 10_000) -> None:
        """Steps until all is done, ``steps`` at most."""
        while steps and self.scheduler.has_requests():
            self.step()
            steps -= 1

    def step(self) -> None:
        """One step, as the engine core and the model runner make it."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

        out = self.scheduler.schedule()
        self.preemptions += len(out.preempted_req_ids or ())
        v1.begin_step(self.adapter, out)
        self._update(out)
        if not out.total_num_scheduled_tokens:
            self.scheduler.update_from_output(out, EMPTY_MODEL_RUNNER_OUTPUT)
            return
        self.adapter.during_step(exposed=True)
        names = list(out.num_scheduled_tokens)
        self._fill(names)
        computed = {n: self._computed[n] for n in names}
        sampled = [self._sample(n, out, computed[n]) for n in names]
        for name, tokens in zip(names, sampled, strict=True):
            self.runner.requests[name].output_token_ids.extend(tokens)
            self._compare(name, out, tokens)
        self.runner.input_batch.num_tokens_no_spec = np.array(
            [self.runner.requests[name].num_tokens for name in names], np.int32
        )

        def draft() -> torch.Tensor:
            return self._draft(out, names, sampled, computed)

        drafts = self.propose(self.adapter, self.runner, out, sampled, draft)
        assert [len(d) for d in drafts] == [len(list(d)) for d in drafts]
        self.longest_seen = max(self.longest_seen, *map(len, drafts))
        self._waiting = dict(zip(names, map(len, drafts), strict=True))
        self.take(out, ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled))
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def take(self, out: Any, made: Any) -> None:
        """Take in what a step made, as the scheduler does."""
        for outputs in self.scheduler.update_from_output(out, made).values():
            if outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats:
                self.stats.append(outputs.scheduler_stats.spec_decoding_stats)
            for each in outputs.outputs:
                self.outputs[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.finished[each.request_id] = str(each.finish_reason)

    def read_rightly(self, name: str) -> bool:
        """Whether the drafter's cache holds all of a request that the target has read, rightly."""
        state = self.runner.requests[name]
        text = [*state.prompt_token_ids, *state.output_token_ids]
        for place in range(min(self.read[name], len(text) - 1)):
            found = self.drafter.cache.get(self._slot(state, place))
            if found != (
                text[place + 1],
                pytest.approx(self._hidden(text[place], place), rel=1e-4),
            ):
                return False
        return True

    def _update(self, out: Any) -> None:
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        requests = self.runner.requests
        self._computed = {}
        for name in out.finished_req_ids:
            requests.pop(name, None)
        for new in out.scheduled_new_reqs:
            requests[new.req_id] = CachedRequestState(
                new.req_id, new.prompt_token_ids, [], new.sampling_params, None, new.block_ids,
                new.num_computed_tokens, [],
            )  # fmt: skip
            self._computed[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            self._computed[name] = cached.num_computed_tokens[i]
            requests[name].num_computed_tokens = cached.num_computed_tokens[i]
            fresh = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                requests[name].block_ids = fresh
            elif fresh is not None:
                requests[name].block_ids[0].extend(fresh[0])

    def _fill(self, names: list[str]) -> None:
        """Put the step's requests into vLLM's batch, row by row."""
        batch = self.runner.input_batch
        batch.req_ids = names
        batch.token_ids_cpu = np.zeros(
            (len(names), self.config.model_config.max_model_len), np.int32
        )
        for row, name in zip(batch.token_ids_cpu, names, strict=True):
            state = self.runner.requests[name]
            row[: state.num_tokens] = [*state.prompt_token_ids, *state.output_token_ids]

    def _sample(self, name: str, out: Any, computed: int) -> list[int]:
        state = self.runner.requests[name]
        drafts = out.scheduled_spec_decode_tokens.get(name, [])
        at = computed + out.num_scheduled_tokens[name] - len(drafts)
        if at < state.num_tokens:
            return []  # a prompt partly read
        truth = [int(t) for t in self.script(name)[at : at + len(drafts) + 1]]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth[accepted]:
            accepted += 1
        return truth[: accepted + 1]

    def _compare(self, name: str, out: Any, tokens: Sequence[int]) -> None:
        drafts = out.scheduled_spec_decode_tokens.get(name, [])
        if tokens:
            verified = sum(t >= 0 for t in drafts)
            self.placeholders += bool(drafts) and not self._waiting.get(name, 0)
            self.told.append((name, self._waiting.get(name, 0), verified))

    def _draft(
        self, out: Any, names: Sequence[str], sampled: Sequence[Sequence[int]], computed: Any
    ) -> torch.Tensor:
        k, states = out.num_spec_tokens_to_schedule, [self.runner.requests[n] for n in names]
        counts, at, ids, following = [], [], [], []
        for name, state, tokens in zip(names, states, sampled, strict=True):
            text = [*state.prompt_token_ids, *state.output_token_ids]
            rejected = len(out.scheduled_spec_decode_tokens.get(name, ()))
            rejected -= max(len(tokens) - 1, 0)
            end = computed[name] + out.num_scheduled_tokens[name] - rejected
            counts.append(end - computed[name])
            self.read[name] = end
            at += [(state, place) for place in range(computed[name], end)]
            ids += text[computed[name] : end]
            following.append(text[end] if end < len(text) else 0)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        ends = torch.tensor([computed[n] + c for n, c in zip(names, counts, strict=True)])
        table = torch.zeros((len(names), 512), dtype=torch.int32)
        for row, state in zip(table, states, strict=True):
            row[: len(state.block_ids[0])] = torch.tensor(state.block_ids[0], dtype=torch.int32)
        batch = Batch(
            starts, starts, ends.int(), ends.int(), len(names), len(at), max(counts),
            int(ends.max()), table, torch.tensor([self._slot(s, p) for s, p in at]),
        )  # fmt: skip
        tokens = torch.tensor(ids, dtype=torch.int32)
        hidden = [self._hidden(t, p) for t, (_, p) in zip(ids, at, strict=True)]
        made = self.draft(
            num_speculative_tokens=k,
            target_token_ids=tokens,
            target_positions=torch.tensor([place for _, place in at]),
            target_hidden_states=torch.tensor(hidden).unsqueeze(1).repeat(1, WIDTH) / WIDTH,
            next_token_ids=torch.tensor(following, dtype=torch.int32),
            common_attn_metadata=batch,
        )
        tokens.zero_()  # vLLM's buffers hold the next step's tokens by then
        table.zero_()
        for row, name, state in zip(made, names, states, strict=True):
            if k and made.shape[1]:
                script = [int(t) for t in self.script(name)[state.num_tokens :]][: self.right]
                row[: len(script[:k])] = torch.tensor(script[:k])
        return made

    def _slot(self, state: Any, place: int) -> int:
        return int(state.block_ids[0][place // BLOCK]) * BLOCK + place % BLOCK

    def _hidden(self, token: int, place: int) -> float:
        return token * 7 + place / 8
