"""Live scenarios: what is sent to a running stack. Files, one scenario each."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipelines.workloads import WORKLOADS

SHIPPED: Final = Path(__file__).parent / "scenarios"


class Phase(BaseModel):
    """Requests of some workloads in turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workloads: tuple[str, ...] = Field(min_length=1)
    requests: int = Field(ge=1, le=100_000)

    @field_validator("workloads")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in WORKLOADS:
                raise ValueError(f"no workload {name!r}: there are {', '.join(WORKLOADS)}")
        return names


class Live(BaseModel):
    """A live scenario: what worker and learner start with, and the phases one after another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    about: str = ""
    start: Literal["first", "counting"] = "first"
    phases: tuple[Phase, ...] = Field(min_length=1)

    @property
    def requests(self) -> int:
        """Of all phases."""
        return sum(phase.requests for phase in self.phases)
