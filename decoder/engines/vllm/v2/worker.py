"""vLLM's worker on an accelerator, with our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class HybridWorker(Worker):  # type: ignore[misc]
    """Makes our runner."""

    def _make_model_runner(self) -> Any:
        from decoder.engines.vllm.v2.runner import HybridRunner

        return HybridRunner(self.vllm_config, self.device)
