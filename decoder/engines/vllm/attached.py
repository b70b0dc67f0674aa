"""Which adapter a model runner has; apart from it, since what it imports must come late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from decoder.engines.vllm.adapter import Adapter

_ATTRIBUTE: Final = "_hybrid"


def adapter_of(runner: Any) -> Adapter | None:
    """The adapter of a model runner; None while vLLM warms up, and where there is no hybrid."""
    adapter: Adapter | None = getattr(runner, _ATTRIBUTE, None)
    return adapter


def give(runner: Any, adapter: Adapter | None) -> None:
    """Make ``adapter`` the one of ``runner``, or take it away.

    An attribute, so that both end together. vLLM pickles configurations and steps between its
    processes, never a runner.
    """
    setattr(runner, _ATTRIBUTE, adapter)
