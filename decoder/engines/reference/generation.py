"""Request options and results of the reference engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decoder.contracts.errors import EngineError
from decoder.contracts.events import Arm


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling at ``temperature`` > 0 from the full distribution; a ``seed`` fixes the output."""

    temperature: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise EngineError("temperature must be above 0: leave sampling out for greedy.")


@dataclass(frozen=True, slots=True)
class CycleRecord:
    """One decoding cycle; lengths in tokens, time in microseconds."""

    arm: Arm
    position: int
    """Output tokens committed before the cycle."""
    verified: int
    """Draft tokens verified."""
    accepted: int
    """Draft tokens committed."""
    us: float
    """Time to propose, decide, draft, run the target, and accept."""


@dataclass(frozen=True)
class Generation:
    """One finished request. The first token comes with the prefill and belongs to no cycle."""

    tokens: list[int]
    cycles: list[CycleRecord]
    finish: Literal["stop", "length"]
    decode_us: float
    """From the end of the prefill to the last token."""
