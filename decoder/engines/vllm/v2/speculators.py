"""Speculators of vLLM's V2 runner: they choose the drafts, and run the model drafter.

The drafter's prefill runs in every step. The choice is made meanwhile, since the host needs only
the sampled tokens for it. The drafter's passes for further tokens come after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from decoder.engines.vllm.requirements import within
from decoder.settings import WorkerSettings

if TYPE_CHECKING:
    from decoder.engines.vllm.ranks import Plan


class CacheSpeculator(BaseSpeculator):  # type: ignore[misc]
    """Makes cache drafts only."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, longest: int, device: Any) -> None:
        """Limit drafts to ``longest`` tokens."""
        self.chooser: Any = None  # the runner; None during vLLM's warm-up
        self._longest, self._device = longest, device

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is nothing to capture."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def propose(self, input_batch: Any, *_: Any, **kwargs: Any) -> Tensor:
        """Drafts int64 [requests, longest]; zeros during vLLM's warm-up."""
        if self.chooser is None:
            shape = len(input_batch.req_ids), self._longest
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        names = input_batch.req_ids
        plan = self.chooser.decide(names, kwargs["num_speculative_tokens"])
        drafts: Tensor = self.chooser.drafts(names, plan, None)
        return drafts


class HybridSpeculator(EagleSpeculator):  # type: ignore[misc]
    """Makes cache drafts, and drafts of at most ``depth`` tokens with an EAGLE3 drafter."""

    def __init__(self, config: Any, device: Any, depth: int) -> None:
        """Make vLLM's speculator, with graphs for ``depth`` tokens."""
        super().__init__(config, device)
        self.chooser: Any = None  # likewise
        # the policy chooses lengths
        self.enable_adaptive_verification = self.use_acceptance_estimator = False
        self._longest = int(config.speculative_config.num_speculative_tokens)
        self.num_speculative_steps = depth
        self.draft_tokens: Tensor = self.draft_tokens[:, :depth].contiguous()
        self._names, self._most = list[str](), self._longest
        self._plan: Plan | None = None

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """As vLLM, with the longest draft: the first pass has the shapes of the target's steps."""
        depth, self.num_speculative_steps = self.num_speculative_steps, self._longest
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.num_speculative_steps = depth

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Drafts int64 [requests, longest]; the drafter's own during vLLM's warm-up."""
        self._most = kwargs.get("num_speculative_tokens", self._longest)
        kwargs["num_speculative_tokens"] = min(self._most, self.num_speculative_steps)
        if (chooser := self.chooser) is None:
            drafts: Tensor = super().propose(input_batch, *args, **kwargs)
            padded = drafts.new_zeros((len(drafts), self._longest))
            padded[:, : drafts.shape[1]] = drafts
            return padded
        self._names, self._plan = input_batch.req_ids, None
        from_model = None
        try:
            from_model = super().propose(input_batch, *args, **kwargs)
        except Exception:  # noqa: BLE001 - the adapter logs it
            chooser.adapter.failed()
        plan = self._plan or chooser.decide(self._names, self._most)
        chosen: Tensor = chooser.drafts(self._names, plan, from_model)
        return chosen

    def on_prefill_end(self, num_reqs: int) -> None:
        """Choose while the device runs the drafter's prefill."""
        super().on_prefill_end(num_reqs)
        chooser = self.chooser
        self._plan = chooser.decide(self._names, self._most) if chooser is not None else None

    def _multi_step_decode(self, *args: Any) -> None:
        if tokens := self._planned(args[-1]):
            super()._multi_step_decode(*args[:-1], tokens)

    def _fused_multi_step_decode(self, *args: Any) -> None:
        if tokens := self._planned(args[-1]):
            super()._fused_multi_step_decode(*args[:-1], tokens)

    def _generate_fused_drafts(self, *args: Any, **kwargs: Any) -> None:
        # vLLM captures it with the longest draft, which would overflow the drafter's buffer
        *rest, tokens = *args, *kwargs.values()
        super()._generate_fused_drafts(*rest, min(tokens, self.num_speculative_steps))

    def _planned(self, tokens: int) -> int:
        """Tokens to draft, including the first, which exists; 0 where no others are planned."""
        planned = tokens if self._plan is None else min(tokens, self._plan.k)
        return planned if planned > 1 else 0


def speculator_for(config: Any, device: Any, _: Any) -> BaseSpeculator:
    """Replaces vLLM's ``init_speculator``, which knows only its own methods."""
    drafts = config.speculative_config
    if drafts.method == "suffix":
        return CacheSpeculator(drafts.num_speculative_tokens, device)
    depth = within(config, WorkerSettings.load()).model_draft_tokens
    return HybridSpeculator(config, device, depth)
