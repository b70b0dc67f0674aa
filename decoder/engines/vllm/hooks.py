"""What of vLLM this plugin touches: none of it is a public interface, so all of it is checked.

A hook with ``wrapped`` is replaced by a function of ours around it; the others are called, or
handed arguments by vLLM, as they are. Where the vLLM that is there differs, loading ends with one
sentence that names the difference, instead of a server that drafts wrongly.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from decoder.contracts.errors import EngineError

EXECUTOR: Final = "vllm.v1.executor.abstract:Executor"
RUNNER: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
_MARK: Final = "_hvd_wrapped"


@dataclass(frozen=True, slots=True)
class Hook:
    """A method of ``owner`` ("module:Class"), or with no ``name`` fields of that dataclass.

    ``expects`` are a method's parameters after ``self`` as :func:`parameters` writes them, or names
    of fields. ``below`` wraps the subclasses' own versions too.
    """

    owner: str
    name: str
    expects: str
    why: str
    wrapped: bool = True
    below: bool = False


HOOKS: Final = (
    Hook(WORKER, "load_model", "*, load_dummy_weights=",
         "before: check the requirements; afterwards: make our worker for this engine"),
    Hook(WORKER, "compile_or_warm_up_model", "",
         "afterwards: profile what a step costs", below=True),
    Hook(WORKER, "reload_weights", "*args, **kwargs",
         "afterwards: policy, drafter and telemetry belong to weights that are gone"),
    Hook(WORKER, "sleep", "level=", "before level 2, which drops the weights: likewise"),
    Hook(WORKER, "reset_weights", "", "afterwards: likewise"),
    Hook(WORKER, "shutdown", "", "before: send what is left"),
    Hook(EXECUTOR, "get_kv_cache_specs", "",
         "before: ask the ranks that it started whether they are as this process"),
    Hook(EXECUTOR, "collective_rpc", "method, timeout=, args=, kwargs=, non_block=",
         "asks them", wrapped=False),
    Hook(RUNNER, "execute_model", "scheduler_output, intermediate_tensors=",
         "before: let go of requests that ended; afterwards: work the next choice can do without"),
    Hook(RUNNER, "_input_fits_in_drafter", "common_attn_metadata",
         "near the context's end vLLM would propose zeros: what fits is seen for each request"),
    Hook(RUNNER, "propose_draft_token_ids",
         "scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, "
         "sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata, "
         "slot_mappings",
         "observe what was committed, choose, draft"),
    Hook("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer", "propose",
         "num_speculative_tokens, target_token_ids, target_positions, target_hidden_states, "
         "next_token_ids, token_indices_to_sample, common_attn_metadata, sampling_metadata, "
         "mm_embed_inputs=, num_rejected_tokens_gpu=, slot_mappings=",
         "the drafter's own pass, which reads several steps at once", wrapped=False),
    Hook("vllm.v1.sample.rejection_sampler:RejectionSampler", "_get_logprobs_tensors",
         "max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids",
         "its rows are padded to the longest draft, so it works on some requests at a time",
         wrapped=False),
    Hook("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder", "sync_batch",
         "batch_update", "a budget for thinking ends with its request", wrapped=False),
    Hook("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder", "update_state",
         "output_token_ids, spec_token_ids, repeat_indices=",
         "thinking is counted as without drafts", wrapped=False),
    Hook("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder", "apply_to_logits",
         "logits, predict_bonus_token, spec_token_ids",
         "the end of thinking is forced as without drafts", wrapped=False),
    Hook("vllm.sampling_params:SamplingParams", "_validate_spec_decode", "speculative_config",
         "afterwards: refuse probabilities of named tokens, which end the engine beside drafts"),
    Hook("vllm.v1.sample.rejection_sampler:RejectionSampler", "apply_penalties",
         "sampling_metadata, metadata, repeat_indices, output_token_ids",
         "counts the vocabulary for rows of requests that asked for no penalty", wrapped=False),
    Hook("vllm.v1.sample.rejection_sampler:RejectionSampler", "_combine_outputs_with_spec_tokens",
         "spec_token_ids=", "copies what was written for each row of every request", wrapped=False),
    Hook("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "initialize_cudagraph_keys",
         "cudagraph_mode, uniform_decode_query_len=",
         "full graphs are for steps in which each request has so many tokens: one", wrapped=False),
    Hook("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "dispatch",
         "num_tokens, uniform_decode=, has_lora=, num_active_loras=, valid_modes=, invalid_modes=",
         "the log tells which graph a step runs on", wrapped=False),
    Hook("vllm.v1.core.sched.output:SchedulerOutput", "",
         "finished_req_ids, preempted_req_ids, scheduled_new_reqs, scheduled_cached_reqs, "
         "scheduled_spec_decode_tokens, num_scheduled_tokens, total_num_scheduled_tokens, "
         "num_spec_tokens_to_schedule",
         "which requests ended, what was verified, and how long a draft may be", wrapped=False),
    Hook("vllm.v1.core.sched.output:NewRequestData", "", "req_id, block_ids, num_computed_tokens",
         "whether a request begins in blocks that the drafter has read", wrapped=False),
    Hook("vllm.v1.core.sched.output:CachedRequestData", "",
         "req_ids, resumed_req_ids, new_block_ids, num_computed_tokens", "likewise", wrapped=False),
    Hook("vllm.config.scheduler:SchedulerConfig", "",
         "max_num_scheduled_tokens, enable_chunked_prefill",
         "how many drafts keep no prompt waiting", wrapped=False),
    Hook("vllm.v1.worker.gpu_input_batch:CachedRequestState", "",
         "num_computed_tokens, prompt_token_ids, output_token_ids, sampling_params, lora_request, "
         "prompt_embeds, prompt_is_token_ids",
         "a request's text and what it asked for", wrapped=False),
    Hook("vllm.v1.attention.backend:CommonAttentionMetadata", "",
         "query_start_loc, query_start_loc_cpu, seq_lens, seq_lens_cpu_upper_bound, num_reqs, "
         "num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, slot_mapping, causal, "
         "dcp_local_seq_lens",
         "where in its cache the drafter writes what it reads late", wrapped=False),
)  # fmt: skip
"""Every place of vLLM 0.32 that this plugin wraps, calls or reads, and why."""


def parameters(function: Callable[..., Any]) -> str:
    """A method's parameters after ``self``; a trailing ``=`` says that there is a default."""
    told, after_star = [], False
    for p in list(inspect.signature(function).parameters.values())[1:]:
        if p.kind is p.VAR_POSITIONAL:
            told.append(f"*{p.name}")
            after_star = True
        elif p.kind is p.VAR_KEYWORD:
            told.append(f"**{p.name}")
        else:
            if p.kind is p.KEYWORD_ONLY and not after_star:
                told.append("*")
                after_star = True
            told.append(p.name + ("=" if p.default is not p.empty else ""))
    return ", ".join(told)


def check(hooks: Sequence[Hook] = HOOKS) -> None:
    """Compare the hooks with the vLLM that is installed.

    Raises:
        EngineError: something is not there, or takes other arguments.
    """
    for hook in hooks:
        owner = _owner(hook)
        if not hook.name:
            there = {field.name for field in dataclasses.fields(owner)}
            missing = [name for name in hook.expects.split(", ") if name not in there]
            if missing:
                raise _differs(f"{hook.owner} has no {', '.join(missing)}")
            continue
        if not hasattr(owner, hook.name):
            raise _differs(f"{hook.owner} has no {hook.name}")
        found = parameters(getattr(owner, hook.name))
        if found != hook.expects:
            raise _differs(
                f"{hook.owner}.{hook.name} takes ({found}) where ({hook.expects}) was expected"
            )


def install(around: Mapping[str, Callable[..., Any]], hooks: Sequence[Hook] = HOOKS) -> None:
    """Wrap what is to be wrapped; repeated calls change nothing more.

    Args:
        around: by name of the method: called with the original, then with its arguments.
    """
    for hook in hooks:
        if not hook.wrapped:
            continue
        owner = _owner(hook)
        below = owner.__subclasses__() if hook.below else []
        for cls in (owner, *below):
            if cls is owner or hook.name in vars(cls):
                _wrap(cls, hook.name, around[hook.name])


def _owner(hook: Hook) -> Any:
    module, _, name = hook.owner.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _differs(f"there is no {hook.owner}") from error


def _differs(what: str) -> EngineError:
    return EngineError(
        f"this vLLM is not the one the plugin was made for: {what}; install the pinned version, or "
        "unset HVD_WORKER_ENABLED."
    )


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
