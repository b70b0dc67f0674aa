"""Which runner vLLM takes, and what it is made to start where that is V2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

_ROOM: Final = "decoder.engines.vllm.v2"
METHODS: Final = ("eagle3", "suffix")
WORKERS: Final = {"vllm.v1.worker.gpu_worker.Worker": f"{_ROOM}.worker.HybridWorker"}
"""The worker that stands in the place of each of vLLM's. On a CPU tests alone run V2, on theirs."""
SCHEDULER: Final = f"{_ROOM}.scheduler.HybridScheduler"
_CACHE_ALONE: Final = "speculative method 'suffix'"
_UNASKED: Final = "drafts of this plugin unless VLLM_USE_V2_MODEL_RUNNER=1 asks for them"


def post_init(original: Callable[..., None], config: Any) -> None:
    """vLLM's own completion of a ``VllmConfig``, which then names our classes. Mutates it.

    vLLM 0.32 schedules asynchronously beside methods in a list of its own. Here drafts of the cache
    are made on its V2 runner as any others are, so they are in that list while it looks.
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
    """What vLLM's V2 runner has not; drafts of the cache alone it has from us.

    Nobody has seen ours on a GPU, where vLLM would choose it. So it is taken where a person asks
    for it, or for what vLLM has on it alone.
    """
    from vllm import envs

    lacking = [feature for feature in original(config) if feature != _CACHE_ALONE]
    asked = (
        envs.VLLM_USE_V2_MODEL_RUNNER is not None
        or config.attention_config.hisparse_config is not None
        or config.watermark_config is not None
        or config.parallel_config.worker_cls in WORKERS.values()  # it was chosen before
        or config._get_v1_model_runner_unsupported_features()
    )
    return lacking if asked else [*lacking, _UNASKED]
