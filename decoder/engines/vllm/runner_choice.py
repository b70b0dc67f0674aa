"""vLLM's choice of model runner, and the classes of ours that a V2 runner starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

_PACKAGE: Final = "decoder.engines.vllm.v2"
METHODS: Final = ("eagle3", "suffix")
WORKERS: Final = {"vllm.v1.worker.gpu_worker.Worker": f"{_PACKAGE}.worker.HybridWorker"}
"""Our worker for each of vLLM's. On a CPU only tests run V2; they add theirs."""
SCHEDULER: Final = f"{_PACKAGE}.scheduler.HybridScheduler"
_SUFFIX_METHOD: Final = "speculative method 'suffix'"
_NOT_REQUESTED: Final = "drafts of this plugin unless VLLM_USE_V2_MODEL_RUNNER=1 is set"


def post_init(original: Callable[..., None], config: Any) -> None:
    """``VllmConfig.__post_init__``, after which the config names our classes. Mutates it.

    vLLM 0.32 schedules asynchronously for a fixed list of methods. Its V2 runner makes our cache
    drafts like any others, so ``suffix`` is added to that list during the call.
    """
    from vllm.config import vllm as module

    drafts = config.speculative_config
    v2 = drafts is not None and drafts.method in METHODS and config.use_v2_model_runner
    listed = module.NgramGPUTypes
    if v2 and drafts.method == "suffix":
        module.NgramGPUTypes = Literal["ngram_gpu", "suffix"]
    try:
        original(config)
    finally:
        module.NgramGPUTypes = listed
    if v2:
        parallel, scheduler = config.parallel_config, config.scheduler_config
        parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)
        if scheduler.async_scheduling and scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = SCHEDULER


def unsupported(original: Callable[..., list[str]], config: Any) -> list[str]:
    """Features that vLLM's V2 runner lacks; this plugin supplies ``suffix``.

    Our V2 speculator has not been run on a GPU yet, where vLLM would choose V2. V2 is therefore
    used only where it is requested, or where vLLM supports a feature on V2 alone.
    """
    from vllm import envs

    lacking = [feature for feature in original(config) if feature != _SUFFIX_METHOD]
    requested = (
        envs.VLLM_USE_V2_MODEL_RUNNER is not None
        or config.attention_config.hisparse_config is not None
        or config.watermark_config is not None
        or config.parallel_config.worker_cls in WORKERS.values()  # chosen earlier
        or config._get_v1_model_runner_unsupported_features()
    )
    return lacking if requested else [*lacking, _NOT_REQUESTED]
