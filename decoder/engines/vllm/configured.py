"""What a vLLM that has chosen its V2 runner is made to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

_ROOM: Final = "decoder.engines.vllm.v2"
METHODS: Final = ("eagle3", "suffix")
WORKERS: Final = {
    "vllm.v1.worker.gpu_worker.Worker": f"{_ROOM}.worker.HybridWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{_ROOM}.on_cpu.HybridCPUWorker",
}
"""The worker that stands in the place of each of vLLM's."""
SCHEDULER: Final = f"{_ROOM}.scheduler.HybridScheduler"
_CACHE_ALONE: Final = "speculative method 'suffix'"


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
    """What vLLM's V2 runner has not; drafts of the cache alone it has from us."""
    return [feature for feature in original(config) if feature != _CACHE_ALONE]


def is_ours(config: Any) -> bool:
    """Whether an engine on the V2 runner starts our worker, and our scheduler where one is due."""
    scheduler = config.scheduler_config
    return config.parallel_config.worker_cls in WORKERS.values() and (
        scheduler.scheduler_cls in (None, SCHEDULER)
    )
