"""Settings of the learner process, from ``HVD_LEARNER_*``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from decoder.contracts.settings import Settings
from decoder.contracts.topics import DRAFTS, LESSONS, Topic


class LearnerSettings(Settings):
    """Settings of a deployment; everything else is a named constant."""

    model_config = SettingsConfigDict(env_prefix="HVD_LEARNER_", frozen=True, extra="forbid")

    mlflow_tracking_uri: str = Field(
        default="sqlite:///mlruns/mlflow.db",
        description="MLflow's tracking URI, also of the registry unless that has its own; a "
        "password in it is never shown",
    )
    mlflow_registry_uri: str = Field(default="", description="MLflow's registry URI, if it differs")
    mlflow_username: str = Field(default="", description="of MLflow's basic authentication")
    mlflow_password: str = Field(
        default="", repr=False, description="of MLflow's basic authentication"
    )
    mlflow_token: str = Field(
        default="", repr=False, description="sent to MLflow instead of name and password"
    )
    registry_prefix: str = Field(
        default="hvd-payoff-",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="prefix of the names of registered models",
    )
    state_dir: Path = Field(
        default=Path("var/learner"),
        description="folder of the learner's state and id; one for each learner",
    )
    intake: Literal["own", "lessons"] = Field(
        default="own",
        description="source of training rows: own, from all draft events; or lessons, from intakes "
        "(python -m learner.intake), of the scopes assigned to this learner",
    )
    awake_scopes: int = Field(
        default=128,
        ge=1,
        le=1_000,
        description="scopes kept in memory, some 7 MB each; others are evicted to the store",
    )
    buffer_events: int = Field(
        default=20_000,
        ge=500,
        le=5_000_000,
        description="drafts kept for training, a scope; about 200 bytes each",
    )
    rows_per_second: float = Field(
        default=100.0,
        gt=0.0,
        description="drafts learned from a second, a scope: above it, requests are sampled; a "
        "hundred take 1% of a core",
    )
    min_events: int = Field(
        default=400, ge=50, description="labelled drafts before a scope starts to learn"
    )
    candidate_every: int = Field(
        default=256, ge=1, description="labelled drafts between two challengers"
    )
    kind: Literal["survival", "payoff"] = Field(
        default="survival",
        description="network to train: survival, a hazard at each position, decided by the "
        "worker's rate; or payoff, the paper's regression, whose threshold is retuned",
    )
    start: Literal["first", "counting"] = Field(
        default="first",
        description="initial policy of a scope, and its fallback: the first policy; or counted "
        "scores, without a fallback to the first policy",
    )
    rollout: Literal["auto", "approve", "off"] = Field(
        default="auto",
        description="promotion of candidates: auto, after a trial on live traffic; approve, by a "
        "person after the trial; off, at once",
    )
    trial_margin: float = Field(
        default=0.1,
        gt=0.0,
        lt=0.5,
        description="loss in rate that live rounds of a trial must exclude; the labels of all "
        "traffic must exclude any loss",
    )
    trial_minutes: float = Field(
        default=30.0,
        gt=0.0,
        description="minutes of traffic until a trial or a watch must be decided",
    )
    host: str = Field(default="127.0.0.1", description="bind address of the learner's page")
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of the page with metrics, health and readiness; none without it",
    )
    log: Literal["text", "json"] = Field(
        default="text", description="format of the log; json writes an object a line"
    )
    keep_versions: int = Field(
        default=20,
        ge=1,
        description="versions to keep of a scope; older ones without an alias are deleted",
    )

    @field_validator("mlflow_tracking_uri", "mlflow_registry_uri")
    @classmethod
    def _has_a_port(cls, uri: str) -> str:
        try:
            _ = urlsplit(uri).port
        except ValueError:  # its message holds what stands in place of the port: maybe a password
            raise ValueError(
                "invalid address; write '/', '@' and ':' of a password as %2F, %40 and %3A"
            ) from None
        return uri

    @property
    def topic(self) -> Topic:
        """The topic that the learner reads."""
        return LESSONS if self.intake == "lessons" else DRAFTS

    @property
    def store_path(self) -> Path:
        """File of the learner's state."""
        return self.state_dir / "state.db"
