"""vLLM's asynchronous scheduler, with the real lengths of drafts in its counters.

vLLM schedules the longest draft for every request before any is known, and counts all of it as
drafted. Here the runner returns the verified lengths with its output.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

VERIFIED: Final = "hvd_verified"
"""Attribute of a ``ModelRunnerOutput``: draft tokens verified, by request."""


class HybridScheduler(AsyncScheduler):  # type: ignore[misc]
    """Counts only verified draft tokens as drafted."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process a step's output; trimmed draft tokens count like those that a grammar forbids."""
        verified = getattr(model_runner_output, VERIFIED, None)
        if verified is not None:
            scheduler_output.num_invalid_spec_tokens = {
                name: len(drafts) - verified.get(name, 0)
                for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
            }
        return super().update_from_output(scheduler_output, model_runner_output)
