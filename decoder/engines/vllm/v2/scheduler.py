"""vLLM's asynchronous scheduler, with counters of what was verified.

It schedules the longest draft for everybody before any is known, and takes all of it for drafted.
What the runner really ran comes back with what it committed.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

VERIFIED: Final = "hvd_verified"
"""Attribute of a ``ModelRunnerOutput``: draft tokens that were verified, by request."""


class HybridScheduler(AsyncScheduler):  # type: ignore[misc]
    """Books drafts as long as they were."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step; what was trimmed of a draft counts as what a grammar forbids."""
        verified = getattr(model_runner_output, VERIFIED, None)
        if verified is not None:
            scheduler_output.num_invalid_spec_tokens = {
                name: len(drafts) - verified.get(name, 0)
                for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
            }
        return super().update_from_output(scheduler_output, model_runner_output)
