"""vLLM's V2 runner on a CPU, for tests: its Triton kernels are interpreted.

vLLM has a door for that (``v1/worker/cpu``), in which streams, events and shared memory are
stand-ins. What it can show is what runner, scheduler and our code say to each other, token for
token; it shows no graphs, no order of streams and no time.
"""

from __future__ import annotations

import functools
from typing import Any

VARIABLES = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Of a process that is to run it."""
WORKER = "tests.engines.v2_on_cpu.HybridCPUWorker"
"""The worker with our runner there."""


class _Masking:
    """What vLLM's kernel does that forbids tokens."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self._mask

    def _mask(
        self, logits: Any, _: int, places: Any, ends: Any, masks: Any, *__: Any, MASK_STRIDE: int,
        **___: Any,
    ) -> None:  # fmt: skip
        import torch

        for place, mask in zip(places.tolist(), masks, strict=False):
            request, position = divmod(place, MASK_STRIDE)
            row = int(ends[request]) + position
            if row < int(ends[request + 1]):
                bits = (mask[:, None] >> torch.arange(32)) & 1
                logits[row, bits.reshape(-1)[: logits.shape[1]] == 0] = float("-inf")


def install(ahead: bool | None) -> None:
    """Before vLLM is imported: have it find Triton, and schedule ``ahead`` or not; with None, as it
    would elsewhere."""
    import triton.backends
    from triton.backends.driver import DriverBase
    from triton.runtime import interpreter

    class Driver(DriverBase):  # type: ignore[misc]
        @staticmethod
        def is_active() -> bool:
            return True

    # vLLM's CPU build looks for the first, any other for one that is not called so
    for name in ("cpu", "interpreted"):
        triton.backends.backends[name] = triton.backends.Backend(compiler=None, driver=Driver)

    # half of the time went into both: patched for each call, undone behind it, and each sum checked
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda _: None
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def updated(cls: Any, config: Any) -> None:
        elsewhere = config.scheduler_config.async_scheduling
        update(cls, config)  # it forbids it on a CPU
        config.scheduler_config.async_scheduling = elsewhere if ahead is None else ahead

    CpuPlatform.check_and_update_config = classmethod(updated)

    # two kernels call what the interpreter does not know
    import vllm.v1.worker.cpu.shm  # noqa: F401  # before the runner, as its worker has it
    from vllm.v1.sample.ops import topk_topp_sampler as sampler
    from vllm.v1.worker.gpu import structured_outputs

    plainly = sampler.apply_top_k_top_p_pytorch
    sampler.apply_top_k_top_p_triton = lambda logits, k, p, **_: plainly(logits, k, p)
    structured_outputs._apply_grammar_bitmask_kernel = _Masking()

    from decoder.engines.vllm import profile, runner_choice

    runner_choice.WORKERS["vllm.v1.worker.cpu_worker.CPUWorker"] = WORKER
    profile.CPU_SECONDS = 1.0  # type: ignore[misc]  # what kernels take here is of no use
