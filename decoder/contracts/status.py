"""Status records: what a worker or a learner says of itself, once a second, on the status topic.

Counters are cumulative since the process started, so that a lost record loses nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from decoder.contracts.errors import ContractError


class WorkerStatus(BaseModel):
    """One serving worker."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["worker"] = "worker"
    process: str
    scope: str
    time: float
    requests_started: int = 0
    requests_stopped: int = 0
    tokens: int = 0
    cycles: dict[str, int] = Field(default_factory=dict)  # by arm
    accepted: dict[str, int] = Field(default_factory=dict)  # draft tokens accepted, by arm
    drafted: dict[str, int] = Field(default_factory=dict)  # draft tokens verified, by arm
    drafts_labelled: int = 0  # cache drafts whose event was made
    events_dropped: int = 0  # by the full queue
    events_sent: int = 0  # acknowledged by the broker
    events_failed: int = 0  # given up by the Kafka client
    queue_depth: int = 0  # events waiting
    policy_version: int = 0
    policy_applied_at: float = 0.0
    policy_kind: str = ""
    threshold: float = 0.0
    rate: float = 0.0  # decision parameter of a survival policy
    fallback: str = ""  # the arm the no-regret floor has put in force, or ""
    fallbacks: int = 0  # times the policy was relieved by it
    advantage: float = 1.0  # time of the best fixed arm over the policy's, recently
    probes: int = 0  # steps decided only to measure the drafter, or a step without drafts
    setup: str = ""  # what the cost table was measured on
    step_us: dict[str, int] = Field(default_factory=dict)  # cost of a step by its tokens
    draft_us: float = 0.0  # what the model drafter adds to a step
    swaps: int = 0
    swap_ms_max: float = 0.0  # from bundle received to bundle in force
    refusals: dict[str, int] = Field(default_factory=dict)  # bundles refused, by reason
    choose_us_p50: float = 0.0  # featurize + predict + decide, one step
    faults: int = 0  # steps in which the hybrid failed and the worker decoded plainly

    @property
    def parameter(self) -> tuple[str, float]:
        """Name and value of the decision parameter in force."""
        is_rate = self.policy_kind == "survival"
        return ("rate", self.rate) if is_rate else ("threshold", self.threshold)


class LearnerStatus(BaseModel):
    """The learner of one or more scopes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["learner"] = "learner"
    process: str
    scope: str
    time: float
    events_consumed: int = 0  # distinct event ids
    events_duplicate: int = 0
    records_refused: int = 0
    buffer: int = 0  # events held for training
    updates: int = 0  # optimiser steps
    drifts: int = 0
    last_drift_at: float = 0.0
    mae: float = 0.0  # champion's absolute error on recent events, tokens
    candidates: int = 0
    promotions: int = 0
    champion_version: int = 0
    threshold: float = 0.0
    lag: int = 0  # records behind the end of the topic


Status = Annotated[WorkerStatus | LearnerStatus, Field(discriminator="role")]
_ADAPTER: TypeAdapter[WorkerStatus | LearnerStatus] = TypeAdapter(Status)


def decode_status(value: bytes) -> WorkerStatus | LearnerStatus:
    """Read a record of the status topic.

    Raises:
        ContractError: not a status of a known role.
    """
    try:
        return _ADAPTER.validate_json(value)
    except ValidationError as error:
        raise ContractError(f"status record refused: {error.errors()[0]['msg']}") from error
