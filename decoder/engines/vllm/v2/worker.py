"""vLLM's workers, with our runner."""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker


class HybridWorker(Worker):  # type: ignore[misc]
    """On an accelerator."""

    def _make_model_runner(self) -> Any:
        from decoder.engines.vllm.v2.runner import HybridRunner

        return HybridRunner(self.vllm_config, self.device)


class HybridCPUWorker(CPUWorker):  # type: ignore[misc]
    """On a CPU, where vLLM's own does not ask which runner it shall make."""

    def init_device(self) -> None:
        """Make our runner where vLLM makes its own."""
        from vllm.v1.worker.cpu import model_runner

        from decoder.engines.vllm.v2.runner import HybridCPURunner

        with mock.patch.object(model_runner, "CPUModelRunner", HybridCPURunner):
            super().init_device()
