"""vLLM's worker on an accelerator, with this plugin's V2 runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class HybridWorker(Worker):  # type: ignore[misc]
    """Makes a :class:`HybridRunner`."""

    def _make_model_runner(self) -> Any:
        from decoder.engines.vllm.v2.runner import HybridRunner

        return HybridRunner(self.vllm_config, self.device)
