"""Settings of the learner process, from ``HVD_LEARNER_*``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from decoder.contracts.settings import Settings


class LearnerSettings(Settings):
    """What two deployments of the learner would set differently; all else is a named constant."""

    model_config = SettingsConfigDict(env_prefix="HVD_LEARNER_", frozen=True, extra="forbid")

    mlflow_tracking_uri: str = "sqlite:///mlruns/mlflow.db"
    state_dir: Path = Path("var/learner")  # checkpoint and the list of refused records
    buffer_events: int = Field(default=20_000, ge=500)  # per scope, about 200 bytes an event
    min_events: int = Field(default=400, ge=50)  # labelled events before a scope's first candidate
    candidate_every: int = Field(default=600, ge=1)  # distinct events between candidates
    candidate_seconds: float = Field(default=15.0, ge=0.0)  # and at least this long between them
    kind: Literal["survival", "payoff"] = "survival"  # of a scope whose champion has no network
    updates_per_second: float = Field(default=20.0, gt=0.0)  # optimiser steps, over all scopes

    @property
    def checkpoint_path(self) -> Path:
        """Where the learner's state lives."""
        return self.state_dir / "checkpoint.safetensors"

    @property
    def refused_path(self) -> Path:
        """Where refused records are listed, one JSON object a line."""
        return self.state_dir / "refused.jsonl"
