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
    """What two deployments of the learner would set differently; all else is a named constant."""

    model_config = SettingsConfigDict(env_prefix="HVD_LEARNER_", frozen=True, extra="forbid")

    mlflow_tracking_uri: str = Field(
        default="sqlite:///mlruns/mlflow.db",
        description="MLflow's tracking URI, and the registry's unless that has an address of its "
        "own; a password in it is shown nowhere",
    )
    mlflow_registry_uri: str = Field(
        default="", description="the registry, where it is not with the tracking server"
    )
    mlflow_username: str = Field(default="", description="of MLflow's basic authentication")
    mlflow_password: str = Field(
        default="", repr=False, description="of MLflow's basic authentication"
    )
    mlflow_token: str = Field(
        default="", repr=False, description="sent to MLflow in place of name and password"
    )
    registry_prefix: str = Field(
        default="hvd-payoff-",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="how the names of registered models begin",
    )
    state_dir: Path = Field(
        default=Path("var/learner"),
        description="folder of the learner's state and of the name that holds leases; one for "
        "each learner",
    )
    intake: Literal["own", "lessons"] = Field(
        default="own",
        description="where lessons come from: own, out of all draft events; or lessons, those that "
        "intakes (python -m learner.intake) wrote, of the scopes that the learners share out",
    )
    awake_scopes: int = Field(
        default=128,
        ge=1,
        le=1_000,
        description="scopes kept in memory, some 7 MB each; the others rest in the store",
    )
    buffer_events: int = Field(
        default=20_000,
        ge=500,
        le=5_000_000,
        description="drafts kept to learn from, a scope; about 200 bytes each",
    )
    rows_per_second: float = Field(
        default=100.0,
        gt=0.0,
        description="drafts learned from a second, a scope: above it whole requests are left out; "
        "a hundred take 1% of a core",
    )
    min_events: int = Field(
        default=400, ge=50, description="labelled drafts before a scope learns at all"
    )
    candidate_every: int = Field(
        default=256, ge=1, description="labelled drafts between two challengers"
    )
    kind: Literal["survival", "payoff"] = Field(
        default="survival",
        description="networks that are trained: survival, a hazard at each position, decided by "
        "the worker's rate; or payoff, the paper's regression, with a threshold that is retuned",
    )
    start: Literal["first", "counting"] = Field(
        default="first",
        description="what a new scope begins with and falls back to: the first policy, or counted "
        "scores, with which the first policy never contends",
    )
    rollout: Literal["auto", "approve", "off"] = Field(
        default="auto",
        description="who promotes what wins offline: a trial on live traffic; after the trial a "
        "person; or nobody, it is served at once",
    )
    trial_margin: float = Field(
        default=0.1,
        gt=0.0,
        lt=0.5,
        description="loss in rate that a trial has to exclude by live rounds; by the labels of all "
        "traffic it has to exclude any",
    )
    trial_minutes: float = Field(
        default=30.0,
        gt=0.0,
        description="minutes of traffic until a trial has to be decided; of a watch as well",
    )
    host: str = Field(default="127.0.0.1", description="where the learner's page is bound")
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="of the page with metrics, health and readiness; without it there is none",
    )
    log: Literal["text", "json"] = Field(
        default="text", description="form of the log; json is an object a line"
    )
    keep_versions: int = Field(
        default=20,
        ge=1,
        description="versions of a scope that stay; older ones without alias are retired",
    )

    @field_validator("mlflow_tracking_uri", "mlflow_registry_uri")
    @classmethod
    def _has_a_port(cls, uri: str) -> str:
        try:
            _ = urlsplit(uri).port
        except ValueError:  # whose words hold what stands in the port's place, be it of a password
            raise ValueError(
                "this is no address; '/', '@' and ':' of a password are written %2F, %40 and %3A"
            ) from None
        return uri

    @property
    def topic(self) -> Topic:
        """What the learner reads."""
        return LESSONS if self.intake == "lessons" else DRAFTS

    @property
    def store_path(self) -> Path:
        """Where the learner's state lives."""
        return self.state_dir / "state.db"
