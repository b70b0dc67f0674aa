"""Every place of vLLM that this plugin uses. None is a public interface, so all are checked.

A hook is wrapped, replaced or overridden by this package, or called as it is. ``contract`` compares
each with its source in the supported versions.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from decoder.engines.vllm.adapter import Adapter

EXECUTOR: Final = "vllm.v1.executor.abstract:Executor"
RUNNER: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
CONFIG: Final = "vllm.config.vllm:VllmConfig"
V2: Final = "vllm.v1.worker.gpu."
SAMPLE: Final = "vllm.v1.sample."
SCHED: Final = "vllm.v1.core.sched."
_MARK: Final = "_hvd_wrapped"
_ADAPTER: Final = "_hybrid"


@dataclass(frozen=True, slots=True)
class Hook:
    """Methods of ``owner`` ("module:Class", where they are defined), functions of it ("module"), or
    some of its fields.

    ``names`` are comma-separated. A ``wrapped`` method is replaced by a function of ours that calls
    it; with ``below``, overrides in subclasses are wrapped too.
    """

    owner: str
    names: str
    why: str
    kind: Literal["wrapped", "called", "fields"] = "called"
    below: bool = False

    def each(self) -> list[str]:
        """The names, one by one."""
        return self.names.split(", ")


HOOKS: Final = (
    Hook(WORKER, "load_model, reload_weights, sleep, reset_weights, shutdown",
         "attach the adapter; disable it when weights change", "wrapped"),
    Hook(WORKER, "compile_or_warm_up_model", "profile steps afterwards", "wrapped", below=True),
    Hook(WORKER, "_make_model_runner", "overridden to make our V2 runner"),
    Hook(EXECUTOR, "get_kv_cache_specs", "compare all ranks first", "wrapped"),
    Hook(EXECUTOR, "collective_rpc", "queries the ranks"),
    Hook(CONFIG, "__post_init__, _get_v2_model_runner_unsupported_features",
         "schedule cache drafts asynchronously; configure our V2 classes", "wrapped"),
    Hook(CONFIG, "_get_v1_model_runner_unsupported_features, use_v2_model_runner",
         "select the runner"),
    Hook("vllm.config.speculative:SpeculativeConfig", "_validate_suffix_decoding",
         "skip the check for a package of suffix trees, which is not used", "wrapped"),
    Hook("vllm.sampling_params:SamplingParams", "_validate_spec_decode",
         "also refuse what ends the engine beside drafts", "wrapped"),
    Hook(RUNNER, "execute_model, propose_draft_token_ids, _input_fits_in_drafter",
         "observe a step, choose and make drafts, up to the end of the context", "wrapped"),
    Hook(RUNNER, "_bookkeeping_sync", "hide generators, whose rewinding fails on a CPU", "wrapped"),
    Hook("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer", "propose",
         "replaced: the drafter's pass, whose prefill is deferred"),
    Hook("vllm.v1.spec_decode.suffix_decoding:SuffixDecodingProposer", "__init__",
         "replaced: would allocate suffix trees, which are not used", "wrapped"),
    Hook(f"{SAMPLE}rejection_sampler:RejectionSampler", "_get_logprobs_tensors",
         "compute in chunks, without padding", "wrapped"),
    Hook(f"{SAMPLE}rejection_sampler:RejectionSampler",
         "apply_penalties, _combine_outputs_with_spec_tokens",
         "replaced: computed for all rows where one request asks"),
    Hook(f"{SAMPLE}rejection_sampler", "expand_batch_to_tokens",
         "replaced: returns uninitialised memory on a CPU"),
    Hook(f"{SAMPLE}ops.topk_topp_sampler", "apply_top_k_top_p",
         "limited to some rows: fails on no rows, and sorts all rows, on a CPU"),
    Hook(f"{SAMPLE}thinking_budget_state:ThinkingBudgetStateHolder",
         "sync_batch, update_state, apply_to_logits",
         "count no drafts as thinking; end a budget with its request", "wrapped"),
    Hook("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "initialize_cudagraph_keys",
         "sizes full graphs by uniform_decode_query_len"),
    Hook(f"{V2}spec_decode", "init_speculator", "replaced: makes a V2 runner's speculator"),
    Hook(f"{V2}model_runner:GPUModelRunner",
         "initialize_kv_cache, execute_model, gather_batch_req_state, sample, sample_tokens, "
         "take_draft_token_ids, _dummy_run",
         "overridden to trim steps to their drafts; profiled"),
    Hook(f"{V2}cudagraph_utils:CudaGraphManager", "_init_candidates",
         "captures full graphs for requests of any lengths"),
    Hook(f"{V2}structured_outputs:StructuredOutputsWorker", "apply_grammar_bitmask",
         "takes a mask for each scheduled position"),
    Hook(f"{V2}spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
         "propose, _multi_step_decode, _fused_multi_step_decode, _generate_fused_drafts",
         "overridden to choose during the drafter's prefill, and to limit its tokens"),
    Hook(f"{V2}spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager",
         "capture", "captures graphs for the longest draft"),
    Hook(f"{SCHED}async_scheduler:AsyncScheduler", "_update_after_schedule",
         "schedules placeholders of the longest draft"),
    Hook(f"{SCHED}scheduler:Scheduler", "update_from_output",
         "overridden: counts placeholders of the longest draft as drafted"),
    Hook(f"{SCHED}scheduler:Scheduler", "update_draft_token_ids_in_output",
         "validates drafts by a grammar before they are trimmed"),
    Hook(f"{SCHED}output:GrammarOutput",
         "structured_output_request_ids, grammar_bitmask, num_acceptable_drafts",
         "trimmed with the step", "fields"),
    Hook(f"{SCHED}output:SchedulerOutput",
         "finished_req_ids, preempted_req_ids, scheduled_new_reqs, scheduled_cached_reqs, "
         "scheduled_spec_decode_tokens, num_scheduled_tokens, total_num_scheduled_tokens, "
         "num_spec_tokens_to_schedule, num_invalid_spec_tokens",
         "ended requests, verified tokens, longest draft", "fields"),
    Hook(f"{SCHED}output:NewRequestData",
         "req_id, block_ids, num_computed_tokens, prompt_token_ids, prefill_token_ids, "
         "sampling_params, lora_request, prompt_embeds, prompt_is_token_ids",
         "a request's text, options and shared blocks", "fields"),
    Hook(f"{SCHED}output:CachedRequestData",
         "req_ids, resumed_req_ids, new_block_ids, num_computed_tokens",
         "a running request's blocks and progress", "fields"),
    Hook("vllm.config.scheduler:SchedulerConfig",
         "max_num_scheduled_tokens, enable_chunked_prefill", "the draft token budget", "fields"),
    Hook("vllm.v1.worker.gpu_input_batch:CachedRequestState",
         "num_computed_tokens, prompt_token_ids, output_token_ids, sampling_params, "
         "lora_request, prompt_embeds, prompt_is_token_ids",
         "a request's text and options", "fields"),
    Hook("vllm.v1.attention.backend:CommonAttentionMetadata",
         "query_start_loc, query_start_loc_cpu, seq_lens, seq_lens_cpu_upper_bound, "
         "num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, "
         "slot_mapping, causal, dcp_local_seq_lens",
         "made anew for a deferred prefill", "fields"),
)  # fmt: skip
"""All hooks, with the reason for each."""


def install(around: Mapping[str, Callable[..., Any]], hooks: Sequence[Hook] = HOOKS) -> None:
    """Wrap the hooks of kind ``wrapped``. Idempotent.

    Args:
        around: wrappers by method name, called with the original and then its arguments.
    """
    for hook in hooks:
        if hook.kind != "wrapped":
            continue
        module, _, name = hook.owner.partition(":")
        owner = getattr(importlib.import_module(module), name)
        below = owner.__subclasses__() if hook.below else []
        for cls, name in itertools.product((owner, *below), hook.each()):
            if cls is owner or name in vars(cls):
                _wrap(cls, name, around[name])


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def adapter_of(runner: Any) -> Adapter | None:
    """The adapter of a model runner; None during vLLM's warm-up, and without hybrid decoding."""
    adapter: Adapter | None = getattr(runner, _ADAPTER, None)
    return adapter


def attach(runner: Any, adapter: Adapter | None) -> None:
    """Bind ``adapter`` to ``runner``, or unbind it with None.

    It is an attribute, so both end together. vLLM pickles configurations and steps between its
    processes, never a runner.
    """
    setattr(runner, _ADAPTER, adapter)
