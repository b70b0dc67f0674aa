"""vLLM's V2 runner on a CPU, for tests: its Triton kernels are interpreted.

vLLM has a door for that (``v1/worker/cpu``), in which streams, events and shared memory are
stand-ins. What it can show is what runner, scheduler and our code say to each other, token for
token; it shows no graphs, no order of streams and no time.
"""

from __future__ import annotations

from typing import Any

VARIABLES = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Of a process that is to run it."""


def install(ahead: bool | None) -> None:
    """Before vLLM is imported: have it find Triton, and schedule ``ahead`` or not; with None, as it
    would elsewhere."""
    import triton.backends
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):  # type: ignore[misc]
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Driver)

    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def updated(cls: Any, config: Any) -> None:
        elsewhere = config.scheduler_config.async_scheduling
        update(cls, config)  # it forbids it on a CPU
        config.scheduler_config.async_scheduling = elsewhere if ahead is None else ahead

    CpuPlatform.check_and_update_config = classmethod(updated)

    from decoder.engines.vllm import profile

    profile.CPU_SECONDS = 1.0  # type: ignore[misc]  # what kernels take here is of no use
