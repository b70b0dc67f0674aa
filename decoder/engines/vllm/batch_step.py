"""The record of a step that a model runner, V1 or V2, reports to the adapter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it brings numba
    from decoder.drafting.matches import Tokens


class EngineLimits(NamedTuple):
    """Limits of the engine."""

    vocabulary: int
    max_model_len: int  # tokens of a request
    drafter_len: int  # tokens of a request that the model drafter can prefill
    step_tokens: int  # tokens of a step
    chunked: bool  # whether prefill is chunked


@dataclass(slots=True)
class BatchStep:
    """A step by rows of the batch."""

    limits: EngineLimits
    names: Sequence[str]
    sampled: Sequence[Sequence[int]]
    """Tokens committed; none during a chunked prefill."""
    verified: Sequence[int]
    """Draft tokens verified."""
    lengths: Sequence[int]
    """Tokens of prompt and output after the step."""
    waiting: int
    """Prompt tokens left to prefill, of all requests."""
    step_tokens: int
    """Tokens that the step ran through the target."""
    longest: int
    """Draft tokens that the next step reserves for a request."""
    request_of: Callable[[int], tuple[Tokens | None, Sequence[int], Any]]
    """Returns a row's request as it was before the step: prompt (None: no drafts, see
    :func:`has_text`), output, and vLLM's ``SamplingParams``."""
    unable: Collection[str] = ()
    """Requests without drafter prefill, for which no model draft can be made."""
    usual: bool = True
    """Whether the step did no deferred work; only then its time informs the cost model."""


def has_text(request: Any) -> bool:
    """Whether a vLLM request has text to copy from, and a policy: not for prompts of embeddings,
    nor for LoRA requests."""
    unsupported = request.prompt_embeds, request.prompt_is_token_ids, request.lora_request
    return request.prompt_token_ids is not None and all(each is None for each in unsupported)
