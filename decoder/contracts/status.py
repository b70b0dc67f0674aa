"""Status records, which workers and learners publish once a second on the status topic.

Counters are cumulative since the process started, so a lost record loses nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from decoder.contracts.errors import ContractError

CONTRACT: Final = "hvd.status.v2"

Contract = Literal["hvd.status.v2"]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Counts = dict[str, Count]
Time = Annotated[float, Field(ge=0, le=2.0**36, allow_inf_nan=False)]  # seconds since the epoch
StepTokens = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


class SideSums(BaseModel):
    """Totals of a variant's compared steps since the worker started.

    Times in microseconds; a step that a comparison used in part counts in part.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    steps: Count = 0
    tokens: Annotated[float, Field(ge=0)] = 0.0
    us: Annotated[float, Field(ge=0)] = 0.0  # wall time
    cost_us: Annotated[float, Field(ge=0)] = 0.0  # by the cost model


class WorkerStatus(BaseModel):
    """One serving worker.

    Every event made has one outcome: sent, in doubt, waiting, dropped, refused, or failed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    contract: Contract = CONTRACT
    role: Literal["worker"] = "worker"
    process: str
    scope: str
    life: str = ""  # random id of this process, the same as in its events
    schema_id: str = ""
    time: Time
    requests_started: Count = 0
    requests_stopped: Count = 0
    tokens: Count = 0
    cycles: Counts = Field(default_factory=dict)  # by arm
    accepted: Counts = Field(default_factory=dict)  # draft tokens accepted, by arm
    drafted: Counts = Field(default_factory=dict)  # draft tokens verified, by arm
    drafts_labelled: Count = 0  # cache drafts whose accepted length became known
    events_made: Count = 0  # one a cycle
    events_sent: Count = 0  # acknowledged by the broker
    events_in_doubt: Count = 0  # sent and never acknowledged: they may be on the topic
    queue_depth: Count = 0  # events waiting, those in flight included
    events_spilled: Count = 0  # of version 0.2.0, which kept events in files
    events_dropped: Count = 0  # by the worker, for any reason
    drops: Counts = Field(default_factory=dict)  # the same by reason
    events_refused: Counts = Field(default_factory=dict)  # for good, by reason
    events_failed: Count = 0  # left when the worker closed
    events_former: Count = 0  # the same
    former_lost: Counts = Field(default_factory=dict)  # the same
    former_unread: Count = 0  # the same
    carrier_deaths: Count = 0  # of the exporter process; it is restarted
    policy_version: Count = 0
    publication: Count = 0  # of the serving policy; 0: shipped with the worker
    policy_role: str = ""
    policy_applied_at: Time = 0.0
    policy_kind: str = ""
    threshold: float = 0.0
    rate: float = 0.0  # decision parameter of a survival policy
    fallback: str = ""  # the fixed arm that the no-regret floor serves, or ""
    fallbacks: Count = 0  # times it replaced the policy
    advantage: float = 1.0  # time of the best fixed arm over the policy's, recently
    probes: Count = 0  # steps decided only to measure the drafter, or a step without drafts
    setup: str = ""  # where the cost table was measured
    step_us: dict[StepTokens, Count] = Field(default_factory=dict)  # cost of a step by its tokens
    draft_us: float = 0.0  # time that the model drafter adds to a step
    swaps: Count = 0
    swap_ms_max: float = 0.0  # from bundle received to bundle serving
    refusals: Counts = Field(default_factory=dict)  # bundles refused, by reason
    ignored: Counts = Field(default_factory=dict)  # bundles skipped: older, leap, role, any
    choose_us_p50: float = 0.0  # featurize + predict + decide, one step
    own_us_p50: float = 0.0  # all work of the router and its adapter in a step
    exposed_us_p50: float = 0.0  # the part of that which the engine waits for
    asleep: Count = 0  # steps without a search for drafts, since none pays (paused)
    undrafted: Count = 0  # model drafts chosen but not made
    grafts: Count = 0  # of version 0.2.0: no longer counted
    left_out: dict[str, Count] = Field(default_factory=dict)  # requests without drafts, by reason
    cache_bytes: Count = 0  # upper bound for the suffix cache
    cache_evicted: Count = 0  # pages of earlier outputs evicted
    cache_shed: Count = 0  # pages of running requests' own text evicted
    faults: Count = 0  # steps in which hybrid decoding failed and the worker decoded plainly
    sides: dict[str, SideSums] = Field(default_factory=dict)  # by variant; other steps: outside
    side: str = ""  # variant that decides now; "" outside of a comparison
    sides_failed: Counts = Field(
        default_factory=dict
    )  # faults of a variant, which is then excluded
    trial_version: Count = 0  # of the policy on trial; 0: none
    trial_publication: Count = 0
    trial_share: float = 0.0  # share of steps that it is given
    rounds_made: Count = 0
    rounds_sent: Count = 0  # acknowledged by the broker
    rounds_dropped: Count = 0  # by a full queue, or refused

    @property
    def events_unaccounted(self) -> int:
        """Events made without an outcome; above 0 only for a moment."""
        delivered = self.events_sent + self.events_in_doubt
        waiting = self.queue_depth + self.events_spilled
        lost = self.events_dropped + self.events_failed + sum(self.events_refused.values())
        return self.events_made - delivered - waiting - lost


class LearnerStatus(BaseModel):
    """The learner of one or more scopes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    contract: Contract = CONTRACT
    role: Literal["learner"] = "learner"
    process: str
    scope: str
    life: str = ""  # random id of this process: the next one resumes its counters
    time: Time
    events_consumed: Count = 0  # distinct
    losses: Counts = Field(default_factory=dict)  # of these, lost for training, by reason
    events_duplicate: Count = 0
    drafts_consumed: Count = 0  # of the events, those whose drafts are trained on
    records_refused: Count = 0
    refusals: Counts = Field(default_factory=dict)  # of these, by reason
    dead_letters_failed: Count = 0  # refused records that the dead-letter topic did not accept
    records_missing: Count = 0  # gaps in the sequences of lives and partitions
    records_duplicate: Count = 0  # with a sequence number received before
    events_unknown: Count = 0  # skipped: of scopes that no worker's status names
    records_skipped: Count = 0  # deleted before they were read, or not decompressible
    faults: Count = 0  # valid records that raised an error in the learner
    # share of requests sampled for training, as the scope's lease holder decides
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    buffer: Count = 0  # drafts held for training
    updates: Count = 0  # optimiser steps
    drifts: Count = 0
    last_drift_at: Time = 0.0
    mae: float = 0.0  # champion's absolute error on the newest drafts, tokens, before learning
    precision: float = 0.0  # of the drafts predicted at six tokens or more, those that brought six
    recall: float = 0.0  # of the drafts that brought six or more, those predicted so
    f1: float = 0.0  # harmonic mean of both
    candidates: Count = 0
    promotions: Count = 0
    champion_version: Count = 0
    publication: Count = 0  # number of the last one of the champion; 0 before the first
    parameter: float = 0.0  # the champion's threshold; 0 where it decides by rate
    parameter_name: str = ""  # rate or threshold
    lag: Count = 0  # records behind the end of the topic
    lag_events: Count = 0  # the same in events, by the mean events of a record so far
    # age of the records read now, or time since a broker last answered
    lag_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    # by the serving policy, of drafts with a complete label, since the scope was loaded
    predicted_tokens: Annotated[float, Field(ge=0)] = 0.0
    accepted_tokens: Count = 0  # of the same drafts
    lease: str = ""  # the learner that may promote and publish for the scope
    holds_lease: bool = False  # whether that is this learner
    waiting: Count = 0  # policies that wait for the registry, of all scopes
    registry_away_since: Time = 0.0  # 0: it answers
    given_up: Counts = Field(default_factory=dict)  # registrations and moves abandoned, by reason
    checkpoint_age: Annotated[float, Field(ge=0)] = 0.0  # seconds since the last checkpoint
    scopes_awake: Count = 0
    scopes_known: Count = 0
    rollout: str = ""  # trial, watch, or "" where no policy is compared with the champion
    trial_version: Count = 0  # of the policy compared: on watch, the previous champion
    trial_share: float = 0.0  # of a worker's steps
    trial_ratio: float = 0.0  # its rate over the champion's by the cost model; 0: no pairs yet
    trial_low: float = 0.0  # bounds of the ratio; 0: too few pairs
    trial_high: float = 0.0
    trial_pairs: Count = 0  # clusters of rounds in which both took part
    rounds_refused: Count = 0  # malformed records of the trials topic
    verdicts: Counts = Field(default_factory=dict)  # finished comparisons, by outcome
    rollout_said: str = ""  # the last move of this learner in the scope, and its reason


Status = Annotated[WorkerStatus | LearnerStatus, Field(discriminator="role")]
_ADAPTER: TypeAdapter[WorkerStatus | LearnerStatus] = TypeAdapter(Status)


def decode_status(value: bytes) -> WorkerStatus | LearnerStatus:
    """Read a record of the status topic.

    Raises:
        ContractError: it is no status of a known role.
    """
    try:
        return _ADAPTER.validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ContractError(f"status record refused: {first['msg']}") from error
