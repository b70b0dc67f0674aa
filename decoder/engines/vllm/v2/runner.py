"""vLLM's V2 model runner, whose steps verify only the chosen drafts.

The calls of a step:

====================  ============================================================================
``execute_model``     trim the step to the drafts that exist, run it
``sample_tokens``     sample; copy the tokens to the host beside the drafter's first pass; choose
                      and make the next drafts
====================  ============================================================================

With asynchronous scheduling the next step is scheduled by then, with placeholders for the longest
draft. Trimming them loses nothing: the scheduler counts them as rejected.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

from decoder.engines.vllm.hooks import adapter_of
from decoder.engines.vllm.ranks import Plan
from decoder.engines.vllm.v2.batch import Batch
from decoder.engines.vllm.v2.scheduler import VERIFIED
from decoder.engines.vllm.v2.speculators import speculator_for

if TYPE_CHECKING:
    from decoder.engines.vllm.adapter import Adapter

log = logging.getLogger(__name__)

GRAPHS: Final = model_runner.ModelCudaGraphManager
model_runner.init_speculator = speculator_for


class HybridRunner(model_runner.GPUModelRunner):  # type: ignore[misc]
    """The runner on an accelerator. ``serving`` is False during vLLM's warm-up."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        """Make vLLM's runner, with this plugin's speculator."""
        super().__init__(vllm_config, device)
        self.serving = False
        self.batch = Batch(self)
        self.adapter: Adapter  # of the current step; set where the speculator has a chooser
        self._copies = torch.cuda.Stream(device)
        self._arrived: Any = None
        # Copies in flight to the host, and their sources, which must outlive them.
        self._sampled: tuple[Any, Any] = (None, None)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; the sampler must not expect lengths that vLLM chose."""
        super().load_model(*args, **kwargs)
        if self.rejection_sampler is not None:
            self.rejection_sampler.enable_adaptive_verification = False

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the KV cache, and have :meth:`graphs` make the CUDA graphs."""
        with mock.patch.object(model_runner, "ModelCudaGraphManager", self.graphs):
            super().initialize_kv_cache(*args, **kwargs)

    def graphs(self, config: Any, device: Any, mode: Any, **kwargs: Any) -> Any:
        """vLLM's CUDA graphs. Those for adaptive verification allow any lengths of requests, so
        steps that verify drafts can run on them; logs whether they do."""
        if self.speculative_config.enable_adaptive_verification:
            backend = get_varlen_cudagraph_unsupported_backend(
                self.attn_groups, config, self.decode_query_len
            )
            kwargs["varlen_decode"] = full = backend is None and mode.separate_routine()
            why = f"{backend[0]} has none" if backend else f"cudagraph_mode {mode.name} has none"
            log.info(
                "steps that verify drafts run on full graphs" if full
                else f"steps that verify drafts have no full graphs of their own: {why}"
            )  # fmt: skip
        return GRAPHS(config, device, mode, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step, trimmed to the drafts that exist."""
        adapter = adapter_of(self) if self.serving and not kwargs.get("dummy_run") else None
        self.speculator.chooser = adapter and self
        if adapter is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        self.adapter = adapter
        adapter.before_step(scheduler_output.finished_req_ids)
        with adapter.suppressing("requests could not be tracked"):
            self.batch.begin(scheduler_output)
        trimmed = self.batch.trimmed(scheduler_output)
        result = super().execute_model(trimmed, *args, **kwargs)
        adapter.during_step(exposed=self.device.type == "cpu")
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and make the next drafts."""
        if self.speculator.chooser is None:
            return super().sample_tokens(grammar_output)
        # vLLM 0.33 takes masks for all scheduled positions
        every = not hasattr(self.structured_outputs_worker, "num_bonus_tokens")
        masks = self.batch.masked(grammar_output, every)
        verified = self.batch.verified
        output = super().sample_tokens(masks)
        if (result := getattr(output, "model_runner_output", None)) is not None:
            setattr(result, VERIFIED, verified)
        return output

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and start copying the tokens to the host before the drafter is launched."""
        result = super().sample(*args, **kwargs)
        if self.speculator.chooser is not None:
            self._arrived = torch.cuda.Event(blocking=True)
            tokens, counts = result[0].sampled_token_ids, result[1]
            with stream(self._copies, self.main_stream):
                self._copies.wait_stream(self.main_stream)
                self._sampled = (async_copy_to_np(tokens), async_copy_to_np(counts)), result
                self._arrived.record(self._copies)
        return result

    def take_draft_token_ids(self) -> Any:
        """The drafts with their real lengths, for a synchronous scheduler."""
        drafts = super().take_draft_token_ids()
        if drafts is None or not self.serving:
            return drafts
        trimmed = [
            tokens[: self.batch.lengths.get(name, 0)]
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        return dataclasses.replace(drafts, draft_token_ids=trimmed)

    def decide(self, names: list[str], most: int) -> Plan:
        """Choose the next drafts of the batch, of at most ``most`` tokens each."""
        self._arrived.synchronize()
        (tokens, counts), self._sampled = self._sampled[0], (None, None)
        sampled = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        with self.adapter.suppressing("committed tokens could not be tracked"):
            self.batch.commit(names, sampled)
        step = functools.partial(self.batch.report, names, sampled, most)
        return self.adapter.decide(len(names), step)

    def drafts(self, names: list[str], plan: Plan, from_model: Tensor | None) -> Tensor:
        """All drafts int64 [requests, longest], padded with -1. ``from_model``: the drafter's."""
        if from_model is None:
            plan = dataclasses.replace(plan, k=0)
        lengths = self.batch.chosen(names, plan)
        self.adapter.drafted(lengths, plan.k)
        given = np.full((len(names), self.num_speculative_steps), -1, np.int64)
        for row, tokens in zip(given, plan.cached, strict=True):
            row[: len(tokens)] = tokens
        drafts = torch.from_numpy(given).to(self.device, non_blocking=True)
        if from_model is not None and plan.k:
            without = np.array([not tokens for tokens in plan.cached])
            model = torch.from_numpy(without).to(self.device, non_blocking=True)
            drafts[:, : plan.k] = torch.where(
                model[:, None], from_model[:, : plan.k], drafts[:, : plan.k]
            )
        return drafts
