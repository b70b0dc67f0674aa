"""The record of a step that a model runner, V1 or V2, reports to the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from decoder.drafting.drafts import Tokens


class EngineLimits(NamedTuple):
    """Limits of the engine."""

    vocabulary: int
    max_model_len: int  # tokens of a request
    drafter_len: int  # tokens of a request that the model drafter can prefill
    step_tokens: int  # tokens of a step
    chunked: bool  # whether prefill is chunked


@dataclass(slots=True)
class BatchStep:
    """A step by rows of the batch. ``states`` have the used fields of vLLM's
    ``CachedRequestState``, after the step."""

    limits: EngineLimits
    names: Sequence[str]
    states: Sequence[Any]
    sampled: Sequence[Sequence[int]]
    """Tokens committed; none during a chunked prefill."""
    verified: Mapping[str, int]
    """Draft tokens verified, by request; requests without any may be missing."""
    scheduled: Mapping[str, int]
    """Tokens that the step ran through the target, by request."""
    step_tokens: int
    """Their sum."""
    longest: int
    """Draft tokens that the next step reserves for a request."""
    ids_of: Callable[[int], Tokens]
    """Returns the token ids of a row, int32, which begin with the prompt."""
