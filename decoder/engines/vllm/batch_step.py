"""What a model runner of vLLM, whichever it is, tells the adapter of a step that ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from decoder.drafting.drafts import Tokens


class EngineLimits(NamedTuple):
    """What an engine was started with."""

    vocabulary: int
    max_model_len: int  # tokens of a request
    drafter_len: int  # tokens of a request that the model drafter reaches to
    step_tokens: int  # tokens of a step
    chunked: bool  # whether a prompt may be read in parts


@dataclass(slots=True)
class BatchStep:
    """A step by rows of the batch. ``states`` have the fields of vLLM's ``CachedRequestState`` that
    are read, with what the step committed."""

    limits: EngineLimits
    names: Sequence[str]
    states: Sequence[Any]
    sampled: Sequence[Sequence[int]]
    """Tokens committed; none where a prompt is only partly read."""
    verified: Mapping[str, int]
    """Draft tokens that were really verified, of requests that had any."""
    scheduled: Mapping[str, int]
    """Tokens of each request that the step ran through the target."""
    step_tokens: int
    """Tokens of all."""
    longest: int
    """Draft tokens of a request that the next step has places for."""
    ids_of: Callable[[int], Tokens]
    """Gives the token ids of a row, int32, which begin with the prompt."""
