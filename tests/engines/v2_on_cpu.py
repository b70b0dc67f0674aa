"""vLLM's worker on a CPU, with our V2 runner.

A module of its own: vLLM's replaces streams and events of an accelerator where it is imported.
"""

from __future__ import annotations

from unittest import mock

from vllm.v1.worker.cpu_worker import CPUWorker


class HybridCPUWorker(CPUWorker):  # type: ignore[misc]
    """Makes our runner where vLLM makes its own, for which it asks nobody."""

    def init_device(self) -> None:
        """Make it."""
        from vllm.v1.worker.cpu import model_runner

        from decoder.engines.vllm.v2.runner import HybridRunner

        class HybridCPURunner(HybridRunner, model_runner.CPUModelRunner):  # type: ignore[misc]
            """Ours, on a CPU."""

        with mock.patch.object(model_runner, "CPUModelRunner", HybridCPURunner):
            super().init_device()
