"""Table of vLLM's settings that are clamped or refused. Checked at load, printed in the docs.

A setting is *clamped* (accepted with a limit, which is logged) or *refused* with one sentence on
what to set. A refusal comes before the weights are loaded. All others are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, Literal

from decoder.contracts.errors import EngineError
from decoder.engines.vllm import runner_choice
from decoder.settings import WorkerSettings

log = logging.getLogger(__name__)

Verdict = Literal["clamped", "refused"]
Test = Callable[[Any, WorkerSettings], object]

HOW_TO_START: Final = (
    "Start it with 'hvd serve', or: HVD_WORKER_ENABLED=1 HVD_WORKER_TENANTS=middleware "
    "vllm serve MODEL --middleware "
    "decoder.tenancy.middleware.TenantMiddleware "
    '--speculative-config \'{"method": "eagle3", "model": "DRAFTER", '
    '"num_speculative_tokens": 64, "disable_padded_drafter_batch": true, '
    '"disable_eagle_block_drop": true}\''
)
_PROCESSORS: Final = "vllm.logits_processors"
MAX_VERIFIED: Final = 128
"""Most draft tokens of a request in a step (``MAX_SPEC_LEN``): with more, an assertion of vLLM's
sampler ends the engine."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """The verdict on certain values of a setting, and the reason.

    ``applies`` tests a ``VllmConfig`` and the worker's settings for these values.
    """

    setting: str
    values: str
    verdict: Verdict
    why: str
    applies: Test


def _num_tokens(config: Any) -> int:
    return int(config.speculative_config.num_speculative_tokens)


def longest_draft(config: Any) -> int:
    """Longest draft of a request that the engine supports, in tokens."""
    return min(_num_tokens(config), MAX_VERIFIED)


def _eagle3(config: Any) -> bool:
    return bool(config.speculative_config.method == "eagle3")


def _own_suffix(config: Any) -> bool:
    given, usual = config.speculative_config, type(config.speculative_config)
    names = [name for name in vars(given) if name.startswith("suffix_decoding_")]
    return any(getattr(given, name) != getattr(usual, name) for name in names)


def can_defer_prefill(config: Any) -> bool:
    """Whether the drafter's inputs are tokens and positions only, so prefill may be deferred."""
    model = config.model_config
    return not (
        model.is_multimodal_model
        or model.uses_mrope
        or config.kv_transfer_config is not None
        or config.parallel_config.data_parallel_size > 1
        or config.parallel_config.tensor_parallel_size > 1  # ranks would have to defer the same
    )


REQUIREMENTS: Final = (
    Requirement("--speculative-config", "absent", "refused",
        f"vLLM reserves no room for drafts in its steps. {HOW_TO_START}",
        lambda c, _: c.speculative_config is None),
    Requirement("method", "any other", "refused",
        f'set "method" to "eagle3" or "suffix": no other drafter can be hybrid. {HOW_TO_START}',
        lambda c, _: c.speculative_config.method not in runner_choice.METHODS),
    Requirement("num_speculative_tokens", "above 128", "clamped",
        "drafts are limited to 128 tokens: a longer one ends the engine in vLLM's sampler",
        lambda c, _: _num_tokens(c) > MAX_VERIFIED),
    Requirement("num_speculative_tokens", "below HVD_WORKER_SUFFIX_MAX_DRAFT", "clamped",
        "cache drafts are limited to it, and to 24 where it is absent with suffix: set both to the "
        "same number for longer ones", lambda c, s: _num_tokens(c) < s.suffix_max_draft),
    Requirement("num_speculative_tokens", "below HVD_WORKER_MODEL_DRAFT_TOKENS", "clamped",
        "model drafts are limited to it",
        lambda c, s: _eagle3(c) and _num_tokens(c) < s.model_draft_tokens),
    Requirement("num_speculative_tokens_per_batch_size", "given", "clamped",
        "a second limit for each step's drafts: the policy takes the batch size into account, so "
        "leave it out",
        lambda c, _: c.speculative_config.num_speculative_tokens_per_batch_size is not None),
    Requirement("max_model_len of the drafter", "below the model's", "clamped",
        "a request gets model drafts until it is as long as that, and cache drafts to its end",
        lambda c, _: _eagle3(c)
        and c.speculative_config.draft_model_config.max_model_len < c.model_config.max_model_len),
    Requirement("disable_padded_drafter_batch", "false with eagle3", "refused",
        'set "disable_padded_drafter_batch": true: a padded batch drafts for every request.',
        lambda c, _: _eagle3(c)
        and not c.use_v2_model_runner
        and not c.speculative_config.disable_padded_drafter_batch),
    Requirement("disable_padded_drafter_batch", "true with eagle3 on the V2 runner", "clamped",
        "it has no effect there, and makes vLLM 0.32 schedule synchronously: leave it out",
        lambda c, _: _eagle3(c)
        and c.use_v2_model_runner
        and c.speculative_config.disable_padded_drafter_batch),
    Requirement("draft_sample_method", "probabilistic", "refused",
        'set "draft_sample_method": "greedy": vLLM would verify cache drafts with the drafter\'s '
        "probabilities, and outputs would no longer have the target's distribution.",
        lambda c, _: c.speculative_config.draft_sample_method == "probabilistic"),
    Requirement("rejection_sample_method", "synthetic, block", "refused",
        'set "rejection_sample_method": "standard": accepted tokens must be the target\'s own.',
        lambda c, _: c.speculative_config.rejection_sample_method != "standard"),
    Requirement("parallel_drafting", "true", "refused",
        'leave "parallel_drafting" out: such a drafter makes all tokens in every step.',
        lambda c, _: c.speculative_config.parallel_drafting),
    Requirement("enable_adaptive_verification", "true with the V1 runner", "refused",
        'leave "enable_adaptive_verification" out: the policy chooses the lengths of drafts.',
        lambda c, _: not c.use_v2_model_runner
        and c.speculative_config.enable_adaptive_verification),
    Requirement("enable_adaptive_verification", "true with the V2 runner", "clamped",
        "the policy chooses lengths; steps with drafts run on its full graphs where the attention "
        "backend supports them, which is logged",
        lambda c, _: c.use_v2_model_runner and c.speculative_config.enable_adaptive_verification),
    Requirement("suffix_decoding_*", "not the defaults", "clamped",
        "vLLM's suffix cache is not used: this plugin's is set with HVD_WORKER_SUFFIX_*",
        lambda c, _: _own_suffix(c)),
    Requirement("--worker-cls, --scheduler-cls", "given, with the V2 runner", "refused",
        "leave --worker-cls and --scheduler-cls out, or set VLLM_USE_V2_MODEL_RUNNER=0: on the V2 "
        "runner drafts need this plugin's worker, and its scheduler if scheduling is asynchronous.",
        lambda c, _: c.use_v2_model_runner
        and (c.parallel_config.worker_cls not in runner_choice.WORKERS.values()
             or c.scheduler_config.scheduler_cls not in (None, runner_choice.SCHEDULER))),
    Requirement("--async-scheduling", "true, with the V1 runner", "refused",
        "leave --async-scheduling out, or set VLLM_USE_V2_MODEL_RUNNER=1: on the V1 runner a draft "
        "depends on the tokens before it.",
        lambda c, _: not c.use_v2_model_runner and c.scheduler_config.async_scheduling),
    Requirement("--tensor-parallel-size", "2 or more, with the V2 runner", "clamped",
        "several ranks were not tested on V2, where a fault of the model drafter ends the engine: "
        "set VLLM_USE_V2_MODEL_RUNNER=0",
        lambda c, _: c.use_v2_model_runner and c.parallel_config.tensor_parallel_size > 1),
    Requirement("--enable-batch-sharded-sampling", "true", "refused",
        "leave --enable-batch-sharded-sampling out: drafts of different lengths were not tested "
        "with ranks that each sample for some requests.",
        lambda c, _: c.parallel_config.enable_batch_sharded_sampling),
    Requirement("--watermark-config", "given", "refused",
        "leave --watermark-config out: vLLM marks tokens by their drafter, and a cache draft has "
        "none.", lambda c, _: c.watermark_config is not None),
    Requirement("draft_tensor_parallel_size", "other than --tensor-parallel-size", "clamped",
        "vLLM ignores it, and splits an EAGLE3 drafter over all ranks",
        lambda c, _: _eagle3(c) and c.speculative_config.draft_tensor_parallel_size
        not in (None, c.parallel_config.tensor_parallel_size)),
    Requirement("--pipeline-parallel-size", "2 or more", "refused",
        "set --pipeline-parallel-size 1: the first stage would not receive the last one's drafts.",
        lambda c, _: c.parallel_config.pipeline_parallel_size > 1),
    Requirement(
        "--decode-context-parallel-size, --prefill-context-parallel-size", "2 or more", "refused",
        "set both context-parallel sizes to 1: the drafter's cache would be split among ranks.",
        lambda c, _: c.parallel_config.decode_context_parallel_size > 1
        or c.parallel_config.prefill_context_parallel_size > 1),
    Requirement("--data-parallel-size", "2 or more, mixture of experts", "refused",
        "set --data-parallel-size 1 and run separate servers: replicas that share experts must run "
        "equally many drafter passes, and each chooses its own.",
        lambda c, _: c.model_config.is_moe and c.parallel_config.data_parallel_size > 1),
    Requirement("--enable-dbo, --ubatch-size", "on", "refused",
        "leave --enable-dbo and --ubatch-size out: drafts cannot be made for half a batch.",
        lambda c, _: c.parallel_config.enable_dbo or c.parallel_config.ubatch_size > 1),
    Requirement("--enable-lora", "true", "clamped",
        "requests that name an adapter get no drafts and send no telemetry: policy, drafter and "
        "scope are the base model's", lambda c, _: c.lora_config is not None),
    Requirement("--enable-lora", "true, with the V2 runner", "refused",
        "set VLLM_USE_V2_MODEL_RUNNER=0: with drafts, vLLM's V2 runner applies another request's "
        "adapter to rows of logits.",
        lambda c, _: c.use_v2_model_runner and c.lora_config is not None),
    Requirement("--enable-prompt-embeds", "true", "clamped",
        "requests whose prompt is embeddings get no drafts: there is no text to copy",
        lambda c, _: c.model_config.enable_prompt_embeds),
    Requirement("model", "multimodal, or with positions of several dimensions", "clamped",
        "the drafter runs in every step, as in plain vLLM: its prefill is not deferred",
        lambda c, _: c.model_config.is_multimodal_model or c.model_config.uses_mrope),
    Requirement("model", "encoder-decoder, recurrent (Mamba and others), diffusion or pooling",
        "refused", "unset HVD_WORKER_ENABLED: drafts need a model that generates text token by "
        "token from attention alone; no other has been shown to be lossless here.",
        lambda c, _: c.model_config.is_encoder_decoder or c.model_config.is_hybrid
        or c.model_config.has_inner_state or c.model_config.is_diffusion
        or c.model_config.runner_type == "pooling"),
    Requirement("--weight-transfer-config", "given", "refused",
        "leave --weight-transfer-config out: policy, drafter and telemetry belong to the weights "
        "that were loaded.", lambda c, _: c.weight_transfer_config is not None),
    Requirement("--kv-transfer-config", "given", "clamped",
        "the drafter runs in every step, so the transferred cache is complete",
        lambda c, _: c.kv_transfer_config is not None),
    Requirement("--structured-outputs-config", "backend lm-format-enforcer", "refused",
        'set "backend" to "auto": with drafts, vLLM refuses each request that uses this backend.',
        lambda c, _: c.structured_outputs_config.backend == "lm-format-enforcer"),
    Requirement("--generation-config, --override-generation-config", "min_p above 0", "refused",
        "set --override-generation-config '{\"min_p\": 0}': with drafts vLLM refuses min_p, so it "
        "would refuse requests that do not set it.",
        lambda c, _: (c.model_config.get_diff_sampling_param().get("min_p") or 0.0) > 0.0),
    Requirement("--logits-processors", "given, or installed as vllm.logits_processors", "refused",
        "leave them out, or unset HVD_WORKER_ENABLED: with drafts vLLM refuses given processors, "
        "and ignores installed ones silently.",
        lambda c, _: c.model_config.logits_processors or entry_points(group=_PROCESSORS)),
)  # fmt: skip


def check(config: Any, settings: WorkerSettings) -> None:
    """Refuse the engine's settings, or log which are clamped.

    Raises:
        EngineError: a setting is refused; the message states what to set.
    """
    for row in _applying("refused", config, settings):
        raise EngineError(f"{row.setting} ({row.values}): {row.why}")
    for row in _applying("clamped", config, settings):
        log.warning("%s (%s): %s", row.setting, row.values, row.why)


def within(config: Any, settings: WorkerSettings) -> WorkerSettings:
    """The worker's settings, with drafts limited to the engine's longest."""
    most, limits = longest_draft(config), ("suffix_max_draft", "model_draft_tokens")
    return settings.model_copy(update={n: min(getattr(settings, n), most) for n in limits})


def _applying(verdict: Verdict, config: Any, settings: WorkerSettings) -> list[Requirement]:
    rows = REQUIREMENTS if config.speculative_config is not None else REQUIREMENTS[:1]
    return [row for row in rows if row.verdict == verdict and row.applies(config, settings)]
