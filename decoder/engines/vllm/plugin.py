"""The entry point of group ``vllm.general_plugins``: hybrid verified decoding inside vLLM.

vLLM keeps its loop, scheduler, sampler and KV cache. ``hooks`` lists the wrapped methods,
``requirements`` the accepted settings; the :class:`~decoder.engines.vllm.adapter.Adapter` does the
work. ``method: eagle3`` has the arms ``cache``, ``model`` and ``none``; ``method: suffix`` has
``cache`` and ``none``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from decoder import parent_watchdog
from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.core.costs import LiveCosts
from decoder.core.payoff.token_classes import token_classes_of
from decoder.engines.vllm import consistency, contract, hooks, requirements, runner_choice
from decoder.engines.vllm.hooks import adapter_of, attach
from decoder.engines.vllm.profile import profile
from decoder.engines.vllm.ranks import Ranks
from decoder.engines.vllm.requirements import longest_draft
from decoder.engines.vllm.v1 import runner as v1
from decoder.engines.vllm.v1 import sampling
from decoder.scope_id import readable, scope_of
from decoder.settings import WorkerSettings
from decoder.telemetry import mapped
from decoder.tenancy.key import VARIABLE, ensure_key, key_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from decoder.engines.vllm.adapter import Adapter
    from decoder.worker import Worker

log = logging.getLogger(__name__)

_WEIGHTS: Final = "the weights are not those it was started with; restart the server to draft again"


def _is_enabled(value: str | None) -> bool:
    try:
        return TypeAdapter(bool).validate_python(value or "off")
    except ValidationError:
        raise SettingsError(
            f"HVD_WORKER_ENABLED={value} is neither on nor off: set 1, or unset it."
        ) from None


def _pass_variables_to_ray() -> None:
    """Have vLLM copy ``HVD_`` variables to Ray's workers, which get only listed ones."""
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
    if "HVD_" not in prefixes:
        os.environ[name] = ",".join([*prefixes, "HVD_"])


def register() -> None:
    """Entry point; vLLM calls it in each of its processes, perhaps more than once.

    Raises:
        EngineError: the plugin is enabled, and this version of vLLM is not supported.
        SettingsError: a setting has an unknown name or a bad value.
    """
    if not _is_enabled(os.environ.get("HVD_WORKER_ENABLED")):
        return
    new_key = ensure_key(os.environ)  # before vLLM starts its other processes, which inherit it
    _pass_variables_to_ray()
    settings = WorkerSettings.load()
    key_of(settings)
    contract.check(*contract.installed())
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import_module("vllm.v1.worker.cpu_worker")  # defines a subclass that is wrapped below

    decoder_log, vllm_log = logging.getLogger("decoder"), logging.getLogger("vllm")
    decoder_log.handlers, decoder_log.propagate = vllm_log.handlers, False
    decoder_log.setLevel(vllm_log.getEffectiveLevel())
    # Its selector warns of every pause of 0.1 s, and a busy machine has many.
    logging.getLogger("kafka").setLevel(logging.ERROR)
    if new_key:
        log.info("names are hashed under a new key: set %s to keep pseudonyms comparable", VARIABLE)
    mapped.install()
    parent_watchdog.watch_parent()
    sampling.patch_sampling()
    hooks.install({**AROUND, "load_model": functools.partial(_load_model, settings)})


def _load_model(
    settings: WorkerSettings, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    # vLLM configures logging after it loads plugins. Only the first rank logs.
    level = logging.getLogger("vllm").getEffectiveLevel()
    logging.getLogger("decoder").setLevel(logging.ERROR if group.rank_in_group else level)
    requirements.check(self.vllm_config, settings)
    consistency.compare_ranks(group)
    if not self.vllm_config.use_v2_model_runner:
        v1.full_graphs_of_plain_steps(self.model_runner)
    result = original(self, *args, **kwargs)
    if (adapter := adapter_of(self.model_runner)) is not None:
        adapter.disable(_WEIGHTS)
    else:
        attach(self.model_runner, _adapter(self.model_runner, settings))
    return result


def _adapter(runner: GPUModelRunner, settings: WorkerSettings) -> Adapter:
    from vllm.distributed.parallel_state import get_tp_group

    # Imports numba, which must not happen before vLLM's CPU worker starts: that searches all
    # modules for kernels, and fails at llvmlite's library object.
    from decoder.engines.vllm.adapter import Adapter

    config, group = runner.vllm_config, get_tp_group()
    ranks = Ranks(group.rank_in_group, group.world_size, group.cpu_group)
    has_model = config.speculative_config.method == "eagle3"
    deferred = None
    if has_model and not config.use_v2_model_runner:
        deferred = v1.deferred_drafter(runner, settings)
    return Adapter(
        _worker(runner, settings) if ranks.leads else None, longest_draft(config),
        has_model=has_model, ranks=ranks, deferred=deferred,
    )  # fmt: skip


def _worker(runner: GPUModelRunner, settings: WorkerSettings) -> Worker:
    from transformers import AutoTokenizer

    from decoder.worker import make_worker  # late, as the adapter

    config, model = runner.vllm_config, runner.vllm_config.model_config
    drafts = config.speculative_config
    drafter = drafts.draft_model_config.model if drafts.method == "eagle3" else None
    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, trust_remote_code=model.trust_remote_code
    )
    settings = requirements.within(config, settings)
    replica = config.parallel_config.data_parallel_index
    if replica:  # a configured name is the same for all replicas
        settings = settings.model_copy(update={"name": f"{settings.name}-{replica}"})
    return make_worker(
        settings,
        KafkaSettings.load(),
        scope_of(model.model, drafter, model.revision),
        token_classes_of(tokenizer, model.get_vocab_size()),
        drafter is not None,
        longest=longest_draft(config),
        names=(readable(model.model), readable(drafter) if drafter else ""),
    )


def _compare_workers(original: Callable[..., Any], executor: Any) -> Any:
    consistency.compare_workers(executor)
    return original(executor)


def _warm_up(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    adapter = adapter_of(self.model_runner)
    if adapter is None:
        return result
    config = self.vllm_config
    if config.use_v2_model_runner:
        self.model_runner.serving = True
        scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
        log.info("drafting on vLLM's V2 runner with %s scheduling", scheduling)
    worker = adapter.worker
    costs = None
    with adapter.suppressing("steps cannot be profiled: costs are learned from service alone"):
        costs = profile(self.model_runner, worker.scope if worker else "", adapter.ranks)
    if worker is not None:
        worker.router.costs = costs or LiveCosts()
    return result


def _reload_weights(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, *args, **kwargs)
    finally:  # partly loaded weights are other weights too
        _disable(self)


def _sleep(original: Callable[..., Any], self: Any, level: int = 1) -> Any:
    if level > 1:
        _disable(self)
    return original(self, level)


def _disable(worker: Any) -> None:
    adapter = adapter_of(worker.model_runner)
    if adapter is not None:
        adapter.disable(_WEIGHTS)


def _shutdown(original: Callable[..., Any], self: Any) -> Any:
    runner = getattr(self, "model_runner", None)
    adapter = adapter_of(runner)
    if adapter is not None:
        attach(runner, None)
        adapter.close()
    return original(self)


def _validate(original: Callable[..., Any], parameters: Any, speculative_config: Any) -> None:
    """vLLM's checks, and a refusal of ``logprob_token_ids``.

    With drafts vLLM ignores them, or the engine ends, since rows of its sampler differ in width.
    """
    original(parameters, speculative_config)
    if speculative_config is not None and parameters.logprob_token_ids:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(
            "logprob_token_ids are not supported beside speculative decoding: ask for logprobs.",
            parameter="logprob_token_ids",
        )


def _validate_suffix(original: Callable[..., Any], self: Any) -> Any:
    """vLLM's checks of the method ``suffix``, without the one for an installed package."""
    from vllm.config import speculative

    speculative.has_arctic_inference = lambda: True
    return original(self)


AROUND: Final[dict[str, Callable[..., Any]]] = {
    "__post_init__": runner_choice.post_init,
    "_get_v2_model_runner_unsupported_features": runner_choice.unsupported,
    "get_kv_cache_specs": _compare_workers,
    "compile_or_warm_up_model": _warm_up,
    "reload_weights": _reload_weights,
    "reset_weights": _reload_weights,
    "sleep": _sleep,
    "shutdown": _shutdown,
    "_validate_spec_decode": _validate,
    "_validate_suffix_decoding": _validate_suffix,
    **v1.AROUND,
    **sampling.AROUND,
}
"""Wrappers by name of the method; that of ``load_model`` is bound to settings in ``register``."""
