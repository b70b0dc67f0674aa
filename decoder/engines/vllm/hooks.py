"""What of vLLM this plugin touches: none of it is a public interface, so all of it is checked.

A hook with ``wrapped`` is replaced by a function of ours around it; the others are called, replaced
in ``sampling``, or handed arguments by vLLM, as they are. ``contract`` compares each with what it
was in the versions that are supported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

EXECUTOR: Final = "vllm.v1.executor.abstract:Executor"
RUNNER: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
CONFIG: Final = "vllm.config.vllm:VllmConfig"
V2: Final = "vllm.v1.worker.gpu."
_MARK: Final = "_hvd_wrapped"


@dataclass(frozen=True, slots=True)
class Hook:
    """A method of ``owner`` ("module:Class"), a function of it ("module"), or some of its fields.

    ``fields`` are names with commas between them. ``below`` wraps the subclasses' own versions too.
    """

    owner: str
    name: str
    why: str
    wrapped: bool = True
    below: bool = False
    fields: str = ""


HOOKS: Final = (
    Hook(WORKER, "load_model",
         "before: check the requirements; afterwards: make our worker for this engine"),
    Hook(WORKER, "compile_or_warm_up_model",
         "afterwards: profile what a step costs", below=True),
    Hook(WORKER, "reload_weights",
         "afterwards: policy, drafter and telemetry belong to weights that are gone"),
    Hook(WORKER, "sleep",
         "before level 2, which drops the weights: likewise"),
    Hook(WORKER, "reset_weights",
         "afterwards: likewise"),
    Hook(WORKER, "shutdown",
         "before: send what is left"),
    Hook(EXECUTOR, "get_kv_cache_specs",
         "before: ask the ranks that it started whether they are as this process"),
    Hook(EXECUTOR, "collective_rpc",
         "asks them", wrapped=False),
    Hook(RUNNER, "execute_model",
         "before: let go of requests that ended; afterwards: work the next choice can do "
         "without"),
    Hook(RUNNER, "_input_fits_in_drafter",
         "near the context's end vLLM would propose zeros: what fits is seen for each request"),
    Hook(RUNNER, "propose_draft_token_ids",
         "observe what was committed, choose, draft"),
    Hook("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer", "propose",
         "the drafter's own pass, which reads several steps at once", wrapped=False),
    Hook(CONFIG, "__post_init__",
         "around: drafts of the cache may be scheduled ahead; afterwards: where vLLM has chosen "
         "its V2 runner, our subclasses are named"),
    Hook(CONFIG, "_get_v2_model_runner_unsupported_features",
         "afterwards: drafts of the cache are not among them; V2 waits to be asked for"),
    Hook(CONFIG, "_get_v1_model_runner_unsupported_features",
         "where there are any, V2 is taken unasked", wrapped=False),
    Hook(CONFIG, "use_v2_model_runner", "says what else takes V2 unasked", wrapped=False),
    Hook(WORKER, "_make_model_runner", "makes our V2 runner", wrapped=False),
    Hook("vllm.v1.worker.cpu_worker:CPUWorker", "init_device",
         "makes a V2 runner under a name that is ours meanwhile", wrapped=False),
    Hook(f"{V2}spec_decode", "init_speculator",
         "makes a V2 runner's speculator: in its place we do", wrapped=False),
    Hook(f"{V2}model_runner:GPUModelRunner", "initialize_kv_cache",
         "makes graphs under a name that is ours meanwhile", wrapped=False),
    Hook(f"{V2}cudagraph_utils:CudaGraphManager", "_init_candidates",
         "has full graphs for requests of any lengths", wrapped=False),
    Hook(f"{V2}model_runner:GPUModelRunner", "execute_model",
         "runs a step that was cut to its drafts", wrapped=False),
    Hook(f"{V2}model_runner:GPUModelRunner", "gather_batch_req_state",
         "counts the drafts of a step by their places", wrapped=False),
    Hook(f"{V2}model_runner:GPUModelRunner", "sample",
         "what it returns is sent to the host", wrapped=False),
    Hook(f"{V2}model_runner:GPUModelRunner", "sample_tokens",
         "samples, and asks for drafts", wrapped=False),
    Hook(f"{V2}model_runner:GPUModelRunner", "take_draft_token_ids",
         "its drafts are cut to what they are", wrapped=False),
    Hook(f"{V2}model_runner:GPUModelRunner", "_dummy_run",
         "times a step", wrapped=False),
    Hook(f"{V2}structured_outputs:StructuredOutputsWorker", "apply_grammar_bitmask",
         "takes masks for as many places as a request has", wrapped=False),
    Hook(f"{V2}spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator", "propose",
         "calls us when the drafter has begun to read", wrapped=False),
    Hook(f"{V2}spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
         "_multi_step_decode", "makes as many tokens as were chosen", wrapped=False),
    Hook(f"{V2}spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
         "_fused_multi_step_decode", "likewise", wrapped=False),
    Hook(f"{V2}spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
         "_generate_fused_drafts", "makes as many as there is room for", wrapped=False),
    Hook(f"{V2}spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager",
         "capture", "captures as many as the longest draft has", wrapped=False),
    Hook("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "_update_after_schedule",
         "schedules places for the longest draft", wrapped=False),
    Hook("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "update_from_output",
         "takes for drafted what it scheduled, but for what is said to be invalid", wrapped=False),
    Hook("vllm.v1.core.sched.scheduler:Scheduler", "update_draft_token_ids_in_output",
         "a grammar judges drafts before they are cut", wrapped=False),
    Hook("vllm.v1.core.sched.output:GrammarOutput", "",
         "masks of what a grammar allows",
         wrapped=False,
         fields="structured_output_request_ids, grammar_bitmask, num_acceptable_drafts"),
    Hook("vllm.config.speculative:SpeculativeConfig", "_validate_suffix_decoding",
         "method suffix asks for a package of suffix trees, of which no draft is taken here"),
    Hook("vllm.v1.spec_decode.suffix_decoding:SuffixDecodingProposer", "__init__",
         "instead: nobody asks it for drafts, so it needs no trees"),
    Hook("vllm.v1.sample.rejection_sampler:RejectionSampler", "_get_logprobs_tensors",
         "its rows are padded to the longest draft, so it works on some requests at a time",
         wrapped=False),
    Hook("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder", "sync_batch",
         "a budget for thinking ends with its request", wrapped=False),
    Hook("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder", "update_state",
         "thinking is counted as without drafts", wrapped=False),
    Hook("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder", "apply_to_logits",
         "the end of thinking is forced as without drafts", wrapped=False),
    Hook("vllm.sampling_params:SamplingParams", "_validate_spec_decode",
         "afterwards: refuse probabilities of named tokens, which end the engine beside "
         "drafts"),
    Hook("vllm.v1.sample.rejection_sampler:RejectionSampler", "apply_penalties",
         "counts the vocabulary for rows of requests that asked for no penalty", wrapped=False),
    Hook("vllm.v1.sample.rejection_sampler:RejectionSampler", "_combine_outputs_with_spec_tokens",
         "copies what was written for each row of every request", wrapped=False),
    Hook("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "initialize_cudagraph_keys",
         "full graphs are for steps in which each request has so many tokens: one", wrapped=False),
    Hook("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "dispatch",
         "the log tells which graph a step runs on", wrapped=False),
    Hook("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens",
         "its memory is not initialised on a CPU", wrapped=False),
    Hook("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p",
         "fails on no rows, and sorts those that ask for nothing, on a CPU", wrapped=False),
    Hook(RUNNER, "_bookkeeping_sync",
         "winds back a generator that has no offset, on a CPU", wrapped=False),
    Hook("vllm.v1.core.sched.output:SchedulerOutput", "",
         "which requests ended, what was verified, and how long a draft may be",
         wrapped=False,
         fields="finished_req_ids, preempted_req_ids, scheduled_new_reqs, scheduled_cached_reqs, "
         "scheduled_spec_decode_tokens, num_scheduled_tokens, total_num_scheduled_tokens, "
         "num_spec_tokens_to_schedule, num_invalid_spec_tokens"),
    Hook("vllm.v1.core.sched.output:NewRequestData", "",
         "whether a request begins in blocks that the drafter has read; its text",
         wrapped=False,
         fields="req_id, block_ids, num_computed_tokens, prompt_token_ids, prefill_token_ids, "
         "sampling_params, lora_request, prompt_embeds, prompt_is_token_ids"),
    Hook("vllm.v1.core.sched.output:CachedRequestData", "",
         "likewise",
         wrapped=False, fields="req_ids, resumed_req_ids, new_block_ids, num_computed_tokens"),
    Hook("vllm.config.scheduler:SchedulerConfig", "",
         "how many drafts keep no prompt waiting",
         wrapped=False, fields="max_num_scheduled_tokens, enable_chunked_prefill"),
    Hook("vllm.v1.worker.gpu_input_batch:CachedRequestState", "",
         "a request's text and what it asked for",
         wrapped=False,
         fields="num_computed_tokens, prompt_token_ids, output_token_ids, sampling_params, "
         "lora_request, prompt_embeds, prompt_is_token_ids"),
    Hook("vllm.v1.attention.backend:CommonAttentionMetadata", "",
         "where in its cache the drafter writes what it reads late",
         wrapped=False,
         fields="query_start_loc, query_start_loc_cpu, seq_lens, seq_lens_cpu_upper_bound, "
         "num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, "
         "slot_mapping, causal, dcp_local_seq_lens"),
)  # fmt: skip
"""Every place of vLLM that this plugin wraps, replaces, calls or reads, and why."""


def install(around: Mapping[str, Callable[..., Any]], hooks: Sequence[Hook] = HOOKS) -> None:
    """Wrap what is to be wrapped; repeated calls change nothing more.

    Args:
        around: by name of the method: called with the original, then with its arguments.
    """
    for hook in hooks:
        if not hook.wrapped:
            continue
        module, _, name = hook.owner.partition(":")
        owner = getattr(importlib.import_module(module), name)
        below = owner.__subclasses__() if hook.below else []
        for cls in (owner, *below):
            if cls is owner or hook.name in vars(cls):
                _wrap(cls, hook.name, around[hook.name])


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
