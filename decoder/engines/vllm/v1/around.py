"""Wrappers of a V1 runner's methods, and the factory of its adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from decoder.contracts.trials import MODEL
from decoder.core.guards.prefill_budget import PrefillBudget
from decoder.engines.vllm.hooks import adapter_of
from decoder.engines.vllm.requirements import reads_with_positions_alone
from decoder.engines.vllm.v1.drafter import LateDrafter
from decoder.settings import WorkerSettings

if TYPE_CHECKING:
    from decoder.engines.vllm.v1.adapter import V1Adapter


def adapter(
    runner: Any, settings: WorkerSettings, *given: Any, has_model: bool, **kwargs: Any
) -> V1Adapter:
    """The adapter of a ``GPUModelRunner``, from the arguments of an :class:`Adapter`. Replaces
    ``propose`` of the runner's drafter by the deferred one."""
    from decoder.engines.vllm.v1.adapter import V1Adapter  # late: it imports numba

    config, late, reading = runner.vllm_config, None, None
    if has_model and reads_with_positions_alone(config):
        late = LateDrafter(runner.drafter)
        # Prefill every request where nothing limits a policy's cost, and for the variant that
        # always uses the model drafter: it could not be compared on requests without prefill.
        if settings.floor and MODEL not in settings.variants:
            models = (config.model_config, config.speculative_config.draft_model_config)
            reading = PrefillBudget(*(m.get_total_num_hidden_layers() for m in models))
    adapter = V1Adapter(
        *given, late=late, has_model=has_model, reading=reading,
        shares_blocks=bool(config.cache_config.enable_prefix_caching), **kwargs,
    )  # fmt: skip
    if late is not None:
        runner.drafter.propose = late.propose
    return adapter


def full_graphs_of_plain_steps(runner: Any) -> None:
    """Capture full CUDA graphs for steps without drafts. Call before vLLM chooses their sizes.

    vLLM captures full graphs, attention included, for steps in which each request has the same
    number of tokens, and rounds the sizes of all steps to multiples of it. With speculation the
    number is the longest draft plus one: with drafts of up to 64, a plain step of one request is
    padded to 65 tokens. Here hardly any step has only longest drafts, and plain steps are frequent,
    so the number is 1, as without speculation. vLLM's runner and dispatcher use it to choose sizes,
    to capture, and to select the graph of a step; it sizes no buffer. Mutates both; a configured
    mode or sizes stay.
    """
    runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1


def _execute_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    adapter: Any = adapter_of(runner)
    if adapter is None:
        return original(runner, scheduler_output, *args, **kwargs)
    adapter.begin_step(scheduler_output)
    result = original(runner, scheduler_output, *args, **kwargs)
    adapter.during_step(exposed=runner.device.type == "cpu")
    adapter.after_step(idle=not (scheduler_output.total_num_scheduled_tokens or runner.requests))
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

    adapter: Any = adapter_of(runner)
    if adapter is None:  # vLLM warms up on dummy requests
        return draft()
    return adapter.propose(runner, scheduler_output, sampled, draft)


def _no_proposer(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """Replaces vLLM's suffix proposer, which would allocate trees: the router makes the drafts."""


AROUND: Final[dict[str, Callable[..., Any]]] = {
    "execute_model": _execute_model,
    "_input_fits_in_drafter": _input_fits_in_drafter,
    "propose_draft_token_ids": _propose,
    "__init__": _no_proposer,
}
"""Wrappers by the name of the wrapped method."""
