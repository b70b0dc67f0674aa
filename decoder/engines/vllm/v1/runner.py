"""What a V1 runner does in a step: wrappers of its methods, which draft at the step's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from decoder.contracts.trials import MODEL
from decoder.core.guards.prefill_budget import PrefillBudget
from decoder.engines.vllm.batch_step import BatchStep, EngineLimits, has_text
from decoder.engines.vllm.hooks import adapter_of
from decoder.engines.vllm.requirements import can_defer_prefill
from decoder.engines.vllm.v1.drafter import MANY, DeferredDrafter
from decoder.settings import WorkerSettings

if TYPE_CHECKING:
    from decoder.engines.vllm.adapter import Adapter
    from decoder.engines.vllm.ranks import Plan


def deferred_drafter(runner: Any, settings: WorkerSettings) -> DeferredDrafter | None:
    """The drafter of a ``GPUModelRunner`` with deferred prefill, in whose drafter it replaces
    ``propose``; None where the drafter has to run in every step."""
    config = runner.vllm_config
    if not can_defer_prefill(config):
        return None
    budget = None
    # Prefill every request where nothing limits a policy's cost, and for the variant that always
    # uses the model drafter: it could not be compared on requests without prefill.
    if settings.floor and MODEL not in settings.variants:
        models = (config.model_config, config.speculative_config.draft_model_config)
        budget = PrefillBudget(*(m.get_total_num_hidden_layers() for m in models))
    shares_blocks = bool(config.cache_config.enable_prefix_caching)
    deferred = DeferredDrafter(runner.drafter, budget, shares_blocks)
    runner.drafter.propose = deferred.propose
    return deferred


def full_graphs_of_plain_steps(runner: Any) -> None:
    """Capture full CUDA graphs for steps without drafts. Call before vLLM chooses their sizes.

    vLLM captures full graphs for steps in which each request has the same number of tokens, and
    rounds the sizes of all steps to multiples of it. With speculation the number is the longest
    draft plus one: a plain step of one request is padded to 65 tokens. Plain steps are frequent
    here, so the number is 1, as without speculation; it sizes no buffer. A configured mode or sizes
    stay. Mutates runner and dispatcher.
    """
    runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1


def begin_step(adapter: Adapter, output: Any) -> None:
    """Stop the requests that ended, before their blocks are reused. ``output`` is the step's
    ``SchedulerOutput``."""
    adapter.before_step(output.finished_req_ids)
    deferred: DeferredDrafter | None = adapter.deferred
    if deferred is None:
        return
    with adapter.suppressing("the drafter could not prefill an ended request"):
        lost = output.finished_req_ids | (output.preempted_req_ids or set())
        deferred.release(lost, active=not adapter.disabled)
    with adapter.own("the drafter could not defer its prefill"):
        deferred.coverage.schedule(output)


def propose(
    adapter: Adapter,
    runner: Any,
    output: Any,
    sampled: Sequence[Sequence[int]],
    draft: Callable[[], Any],
) -> list[list[int]]:
    """Observe the committed tokens; returns each request's draft, in the order of the batch.

    Args:
        sampled: committed tokens by row; none during a chunked prefill.
        draft: vLLM's own method, which runs the drafter and returns rows of tokens.
    """
    names = list(runner.input_batch.req_ids)
    deferred: DeferredDrafter | None = adapter.deferred
    if deferred is not None and not adapter.disabled:
        with adapter.own("the drafter could not defer its prefill"):
            deferred.admit(names, output.num_scheduled_tokens)
    plan = adapter.decide(len(names), lambda: step_of(adapter, runner, names, output, sampled))
    if adapter.disabled:
        return [[] for _ in names]
    from_model = _run_drafter(adapter, output, plan, draft) if adapter.has_model else []
    drafts = plan.proposals(from_model)
    adapter.drafted([*map(len, drafts)], plan.k if any(from_model) else 0)
    return drafts


def _run_drafter(
    adapter: Adapter, output: Any, plan: Plan, draft: Callable[[], Any]
) -> list[list[int]]:
    """Run the model drafter as planned; its drafts by row, none where it makes none."""
    deferred: DeferredDrafter | None = adapter.deferred
    with adapter.own("the prefill budget could not be updated"):
        if deferred is not None:
            router = adapter.worker.router if adapter.worker is not None else None
            deferred.prepare(adapter.ended, output.total_num_scheduled_tokens, router)
    output.num_spec_tokens_to_schedule = plan.k  # vLLM's drafter makes that many
    try:
        drafts = draft()
        return list(drafts.tolist()) if plan.k else []
    except Exception:  # noqa: BLE001 - logged
        adapter.failed()
        return []


def step_of(
    adapter: Adapter,
    runner: Any,
    names: Sequence[str],
    output: Any,
    sampled: Sequence[Sequence[int]],
) -> BatchStep:
    """The step that a ``GPUModelRunner`` ran, from its ``SchedulerOutput``."""
    requests, batch, scheduler = runner.requests, runner.input_batch, runner.scheduler_config
    limits = EngineLimits(
        batch.vocab_size, runner.max_model_len, runner.effective_drafter_max_model_len,
        scheduler.max_num_scheduled_tokens, scheduler.enable_chunked_prefill,
    )  # fmt: skip
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    lengths = batch.num_tokens_no_spec[: len(names)].tolist()
    partial = [row for row, tokens in enumerate(sampled) if not tokens]
    waiting = sum(
        lengths[row] - requests[names[row]].num_computed_tokens - scheduled[names[row]]
        for row in partial
    )

    def request_of(row: int) -> tuple[Any, Sequence[int], Any]:
        state = requests[names[row]]
        text = batch.token_ids_cpu[row]  # a view: converting 128k tokens takes milliseconds
        prompt = text[: len(state.prompt_token_ids)] if has_text(state) else None
        before = len(state.output_token_ids) - len(sampled[row])
        return prompt, state.output_token_ids[:before], state.sampling_params

    # the scheduler marks placeholders, and drafts refused by a grammar, with -1
    verified = [len(t) - t.count(-1) if (t := drafts.get(name)) else 0 for name in names]
    deferred: DeferredDrafter | None = adapter.deferred
    return BatchStep(
        limits, names, sampled, verified, lengths, waiting, output.total_num_scheduled_tokens,
        output.num_spec_tokens_to_schedule, request_of,
        unable=deferred.unable if deferred is not None else (),
        usual=deferred is None or deferred.prefilled < MANY,
    )  # fmt: skip


def _execute_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    adapter = adapter_of(runner)
    if adapter is None:
        return original(runner, scheduler_output, *args, **kwargs)
    begin_step(adapter, scheduler_output)
    result = original(runner, scheduler_output, *args, **kwargs)
    adapter.during_step(exposed=runner.device.type == "cpu")
    return result


def _input_fits_in_drafter(original: Callable[..., Any], runner: Any, metadata: Any) -> bool:
    """Keep proposing near the end of the context, where vLLM would stop and verify zeros.

    vLLM reserves ``num_speculative_tokens``, here the longest cache draft, for any drafter. Cache
    drafts are limited to the room of their request, and labels need every committed token; the
    adapter limits model drafts to the drafter's room.
    """
    if adapter_of(runner) is None or metadata is None:
        return bool(original(runner, metadata))
    return True


def _propose(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, sampled: Any, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    def draft() -> Any:
        return original(runner, scheduler_output, sampled, *args, **kwargs)

    adapter = adapter_of(runner)
    if adapter is None:  # vLLM warms up on dummy requests
        return draft()
    return propose(adapter, runner, scheduler_output, sampled, draft)


def _no_proposer(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """Replaces vLLM's suffix proposer, which would allocate trees: the router makes the drafts."""


AROUND: Final[dict[str, Callable[..., Any]]] = {
    "execute_model": _execute_model,
    "_input_fits_in_drafter": _input_fits_in_drafter,
    "propose_draft_token_ids": _propose,
    "__init__": _no_proposer,
}
"""Wrappers by the name of the wrapped method."""
