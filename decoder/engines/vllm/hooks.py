"""Every place of vLLM that this plugin uses. None is a public interface, so all are checked.

A hook is wrapped here, replaced in ``v1.sampling``, or called as it is. ``contract`` compares each
with its source in the supported versions.
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
    """Methods of ``owner`` ("module:Class"), functions of it ("module"), or some of its fields.

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
         "weights come, and go", "wrapped"),
    Hook(WORKER, "compile_or_warm_up_model", "then profile a step", "wrapped", below=True),
    Hook(WORKER, "_make_model_runner", "makes our V2 runner"),
    Hook(EXECUTOR, "get_kv_cache_specs", "before: ask the ranks that it started", "wrapped"),
    Hook(EXECUTOR, "collective_rpc", "asks them"),
    Hook(CONFIG, "__post_init__, _get_v2_model_runner_unsupported_features",
         "drafts of the cache may be scheduled ahead, and our subclasses are named", "wrapped"),
    Hook(CONFIG, "_get_v1_model_runner_unsupported_features, use_v2_model_runner",
         "say what takes V2 unasked"),
    Hook("vllm.config.speculative:SpeculativeConfig", "_validate_suffix_decoding",
         "asks for a package of suffix trees, of which no draft is taken here", "wrapped"),
    Hook("vllm.sampling_params:SamplingParams", "_validate_spec_decode",
         "afterwards: refuse what ends the engine beside drafts", "wrapped"),
    Hook(RUNNER, "execute_model, propose_draft_token_ids, _input_fits_in_drafter",
         "observe what was committed, choose, draft; to the end of the context", "wrapped"),
    Hook(RUNNER, "_bookkeeping_sync", "winds back a generator that has no offset, on a CPU"),
    Hook("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer", "propose",
         "the drafter's own pass, which reads several steps at once"),
    Hook("vllm.v1.spec_decode.suffix_decoding:SuffixDecodingProposer", "__init__",
         "instead: nobody asks it for drafts, so it needs no trees", "wrapped"),
    Hook(f"{SAMPLE}rejection_sampler:RejectionSampler",
         "_get_logprobs_tensors, apply_penalties, _combine_outputs_with_spec_tokens",
         "make for every row what some ask for"),
    Hook(f"{SAMPLE}rejection_sampler", "expand_batch_to_tokens",
         "its memory is not initialised on a CPU"),
    Hook(f"{SAMPLE}ops.topk_topp_sampler", "apply_top_k_top_p",
         "fails on no rows, and sorts those that ask for nothing, on a CPU"),
    Hook(f"{SAMPLE}thinking_budget_state:ThinkingBudgetStateHolder",
         "sync_batch, update_state, apply_to_logits",
         "thinking is counted, and ends, as without drafts, and a budget with its request"),
    Hook("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "initialize_cudagraph_keys",
         "full graphs are for steps in which each request has one token"),
    Hook(f"{V2}spec_decode", "init_speculator",
         "makes a V2 runner's speculator: in its place we do"),
    Hook(f"{V2}model_runner:GPUModelRunner",
         "initialize_kv_cache, execute_model, gather_batch_req_state, sample, sample_tokens, "
         "take_draft_token_ids, _dummy_run",
         "make graphs; run a step that was cut to its drafts, sample, draft; time a step"),
    Hook(f"{V2}cudagraph_utils:CudaGraphManager", "_init_candidates",
         "has full graphs for requests of any lengths"),
    Hook(f"{V2}structured_outputs:StructuredOutputsWorker", "apply_grammar_bitmask",
         "takes masks for as many places as a request has"),
    Hook(f"{V2}spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
         "propose, _multi_step_decode, _fused_multi_step_decode, _generate_fused_drafts",
         "call us when the drafter has begun to read; make as many tokens as were chosen"),
    Hook(f"{V2}spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager",
         "capture", "captures as many as the longest draft has"),
    Hook(f"{SCHED}async_scheduler:AsyncScheduler", "_update_after_schedule, update_from_output",
         "schedules places for the longest draft, and takes them for drafted"),
    Hook(f"{SCHED}scheduler:Scheduler", "update_draft_token_ids_in_output",
         "a grammar judges drafts before they are cut"),
    Hook(f"{SCHED}output:GrammarOutput",
         "structured_output_request_ids, grammar_bitmask, num_acceptable_drafts",
         "masks of what a grammar allows", "fields"),
    Hook(f"{SCHED}output:SchedulerOutput",
         "finished_req_ids, preempted_req_ids, scheduled_new_reqs, scheduled_cached_reqs, "
         "scheduled_spec_decode_tokens, num_scheduled_tokens, total_num_scheduled_tokens, "
         "num_spec_tokens_to_schedule, num_invalid_spec_tokens",
         "which requests ended, what was verified, and how long a draft may be", "fields"),
    Hook(f"{SCHED}output:NewRequestData",
         "req_id, block_ids, num_computed_tokens, prompt_token_ids, prefill_token_ids, "
         "sampling_params, lora_request, prompt_embeds, prompt_is_token_ids",
         "a request's text, and whether it begins in blocks that were read", "fields"),
    Hook(f"{SCHED}output:CachedRequestData",
         "req_ids, resumed_req_ids, new_block_ids, num_computed_tokens", "likewise", "fields"),
    Hook("vllm.config.scheduler:SchedulerConfig",
         "max_num_scheduled_tokens, enable_chunked_prefill",
         "how many drafts keep no prompt waiting", "fields"),
    Hook("vllm.v1.worker.gpu_input_batch:CachedRequestState",
         "num_computed_tokens, prompt_token_ids, output_token_ids, sampling_params, "
         "lora_request, prompt_embeds, prompt_is_token_ids",
         "a request's text and what it asked for", "fields"),
    Hook("vllm.v1.attention.backend:CommonAttentionMetadata",
         "query_start_loc, query_start_loc_cpu, seq_lens, seq_lens_cpu_upper_bound, "
         "num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, "
         "slot_mapping, causal, dcp_local_seq_lens",
         "where in its cache the drafter writes what it reads late", "fields"),
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
