"""What stands around the methods of a V1 runner, and makes its adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from decoder.contracts.trials import MODEL
from decoder.engines.vllm.hooks import adapter_of
from decoder.engines.vllm.requirements import reads_with_positions_alone
from decoder.engines.vllm.v1.drafter import LateDrafter
from decoder.engines.vllm.v1.prefill_budget import PrefillBudget
from decoder.settings import WorkerSettings

if TYPE_CHECKING:
    from decoder.engines.vllm.v1.adapter import V1Adapter


def adapter(
    runner: Any, settings: WorkerSettings, *given: Any, has_model: bool, **rest: Any
) -> V1Adapter:
    """The adapter of a ``GPUModelRunner``, of what an :class:`Adapter` takes. Replaces its
    drafter's ``propose`` by a late one's."""
    from decoder.engines.vllm.v1.adapter import V1Adapter  # late: it brings numba

    config, late, reading = runner.vllm_config, None, None
    if has_model and reads_with_positions_alone(config):
        late = LateDrafter(runner.drafter)
        # Without the floor a policy has its way whatever that costs, and a side that always drafts
        # is not compared where it cannot: then all is read.
        if settings.floor and MODEL not in settings.variants:
            models = (config.model_config, config.speculative_config.draft_model_config)
            reading = PrefillBudget(*(m.get_total_num_hidden_layers() for m in models))
    made = V1Adapter(
        *given, late=late, has_model=has_model, reading=reading,
        shares_blocks=bool(config.cache_config.enable_prefix_caching), **rest,
    )  # fmt: skip
    if late is not None:
        runner.drafter.propose = late.propose
    return made


def full_graphs_of_plain_steps(runner: Any) -> None:
    """Have vLLM's full graphs be of steps without drafts. To be called before it chooses them.

    vLLM keeps full graphs, with attention in them, for steps in which each request has one number
    of tokens, and rounds all sizes, those of other steps too, to multiples of it. With speculation
    that is the longest draft and one more: with drafts of up to 64, a plain step of one request
    takes 65. Steps whose requests all have the longest draft hardly occur here, and plain ones do
    all the time, so the number is what it is without speculation. By it vLLM's runner and
    dispatcher choose sizes, make the steps that are captured, and tell which steps may run on them;
    it sizes no buffer. Mutates both; a mode or sizes that a person set stay.
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
    """Near the end of the context vLLM would stop proposing, and verify zeros instead.

    It reserves ``num_speculative_tokens``, here the largest cache draft, for any drafter. A cache
    draft is cut to the room its request has, and labels need every committed token, so proposing
    goes on; the adapter cuts model drafts to what the drafter has room for.
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
    """In the place of vLLM's suffix decoding, which holds trees: drafts are the router's."""


AROUND: Final[dict[str, Callable[..., Any]]] = {
    "execute_model": _execute_model,
    "_input_fits_in_drafter": _input_fits_in_drafter,
    "propose_draft_token_ids": _propose,
    "__init__": _no_proposer,
}
"""What stands around each method of the runner that is wrapped."""
