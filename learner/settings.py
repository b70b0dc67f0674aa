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
    registry_prefix: str = Field(default="hvd-payoff-", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    state_dir: Path = Path("var/learner")  # checkpoint, scopes and the name that holds leases
    awake_scopes: int = Field(default=32, ge=1, le=1_000)  # in memory; the others rest in files
    buffer_events: int = Field(default=20_000, ge=500)  # per scope, about 200 bytes an event
    rows_per_second: float = Field(default=100.0, gt=0.0)  # learned from, a scope: 1% of a core
    min_events: int = Field(default=400, ge=50)  # labelled events before a scope learns at all
    candidate_every: int = Field(default=256, ge=1)  # of them, between two contestants
    kind: Literal["survival", "payoff"] = "survival"  # of a scope whose champion has no network
    start: Literal["first", "counting"] = "first"  # what a new scope begins with, and falls back to
    rollout: Literal["auto", "approve", "off"] = "auto"  # off: what wins offline is served at once
    trial_margin: float = Field(default=0.03, gt=0.0, lt=0.5)  # loss in rate that must be excluded
    trial_minutes: float = Field(default=30.0, gt=0.0)  # of rounds, until a trial has to be decided
    host: str = "127.0.0.1"  # where the page with metrics, health and readiness is bound
    port: int | None = Field(default=None, ge=0, le=65535)  # of that page; None: there is none
    log: Literal["text", "json"] = "text"  # json: an object a line, for whatever collects logs
    keep_versions: int = Field(default=20, ge=1)  # of a scope; older ones without alias are retired

    @property
    def checkpoint_path(self) -> Path:
        """Where the learner's state lives."""
        return self.state_dir / "checkpoint.safetensors"
