"""Status records: what a worker or a learner says of itself, once a second, on the status topic.

Counters are cumulative since the process started, so that a lost record loses nothing.
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
    """What one side made of the steps it was compared in, since the worker started.

    Microseconds; tokens of a step that a comparison took in part are counted in part.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    steps: Count = 0
    tokens: Annotated[float, Field(ge=0)] = 0.0
    us: Annotated[float, Field(ge=0)] = 0.0  # wall time
    cost_us: Annotated[float, Field(ge=0)] = 0.0  # at the costs in force


class WorkerStatus(BaseModel):
    """One serving worker.

    Every event made is in one place: sent, in doubt, waiting, dropped, refused, or failed.
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
    events_in_doubt: Count = 0  # sent and never acknowledged: they may lie on the topic
    queue_depth: Count = 0  # events waiting, the ones under way included
    events_spilled: Count = 0  # of version 0.2.0, which kept events in files
    events_dropped: Count = 0  # by the worker, for any reason
    drops: Counts = Field(default_factory=dict)  # of these, by reason
    events_refused: Counts = Field(default_factory=dict)  # for good, by reason
    events_failed: Count = 0  # left when the worker closed
    events_former: Count = 0  # the same
    former_lost: Counts = Field(default_factory=dict)  # the same
    former_unread: Count = 0  # the same
    carrier_deaths: Count = 0  # of the process that carries events; it is started again
    policy_version: Count = 0
    publication: Count = 0  # of the policy in force; 0: it came with the worker
    policy_role: str = ""
    policy_applied_at: Time = 0.0
    policy_kind: str = ""
    threshold: float = 0.0
    rate: float = 0.0  # decision parameter of a survival policy
    fallback: str = ""  # the arm the no-regret floor has put in force, or ""
    fallbacks: Count = 0  # times the policy was relieved by it
    advantage: float = 1.0  # time of the best fixed arm over the policy's, recently
    probes: Count = 0  # steps decided only to measure the drafter, or a step without drafts
    setup: str = ""  # what the cost table was measured on
    step_us: dict[StepTokens, Count] = Field(default_factory=dict)  # cost of a step by its tokens
    draft_us: float = 0.0  # what the model drafter adds to a step
    swaps: Count = 0
    swap_ms_max: float = 0.0  # from bundle received to bundle in force
    refusals: Counts = Field(default_factory=dict)  # bundles refused, by reason
    ignored: Counts = Field(default_factory=dict)  # bundles passed over: older, leap, role
    choose_us_p50: float = 0.0  # featurize + predict + decide, one step
    own_us_p50: float = 0.0  # all that the router and its adapter do in a step
    exposed_us_p50: float = 0.0  # of that, what the engine waits for
    asleep: Count = 0  # steps in which no draft was looked for, since none pays
    undrafted: Count = 0  # model drafts chosen and not made
    grafts: Count = 0  # of version 0.2.0: no worker counts any more
    left_out: dict[str, Count] = Field(default_factory=dict)  # requests, by reason
    cache_bytes: Count = 0  # of the suffix cache, at most
    cache_evicted: Count = 0  # pages of outputs that gave way
    cache_shed: Count = 0  # pages of the text of requests under way that gave way
    faults: Count = 0  # steps in which the hybrid failed and the worker decoded plainly
    sides: dict[str, SideSums] = Field(default_factory=dict)  # compared by turns; the rest: outside
    side: str = ""  # that decides now; "" outside of a comparison
    sides_failed: Counts = Field(default_factory=dict)  # faults of a side, which then plays no more
    trial_version: Count = 0  # of the policy on trial; 0: none
    trial_publication: Count = 0
    trial_share: float = 0.0  # part of the steps that it asks for
    rounds_made: Count = 0
    rounds_sent: Count = 0  # acknowledged by the broker
    rounds_dropped: Count = 0  # by a full queue, or refused

    @property
    def events_unaccounted(self) -> int:
        """Events made that are in none of the places; 0 but for those on their way."""
        delivered = self.events_sent + self.events_in_doubt
        held = self.queue_depth + self.events_spilled
        lost = self.events_dropped + self.events_failed + sum(self.events_refused.values())
        return self.events_made - delivered - held - lost


class LearnerStatus(BaseModel):
    """The learner of one or more scopes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    contract: Contract = CONTRACT
    role: Literal["learner"] = "learner"
    process: str
    scope: str
    life: str = ""  # random id of this process: another's counters go on from its checkpoint
    time: Time
    events_consumed: Count = 0  # distinct
    losses: Counts = Field(default_factory=dict)  # of these, whose lesson is gone, by reason
    events_duplicate: Count = 0
    drafts_consumed: Count = 0  # of the events, those whose drafts train
    records_refused: Count = 0
    refusals: Counts = Field(default_factory=dict)  # of these, by reason
    dead_letters_failed: Count = 0  # refused records that their topic did not take
    records_missing: Count = 0  # gaps in the sequences of lives and partitions
    records_duplicate: Count = 0  # with a sequence number that came before
    events_unknown: Count = 0  # of scopes that no worker's status names: passed over
    records_skipped: Count = 0  # gone before they were read, or not to be unpacked
    faults: Count = 0  # records that could not be learned from though they keep the contract
    # of requests that are learned from, as the scope's holder decides
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    buffer: Count = 0  # drafts held for training
    updates: Count = 0  # optimiser steps
    drifts: Count = 0
    last_drift_at: Time = 0.0
    mae: float = 0.0  # champion's absolute error on recent events, tokens
    candidates: Count = 0
    promotions: Count = 0
    champion_version: Count = 0
    publication: Count = 0  # number of the last one of the champion; 0 before the first
    parameter: float = 0.0  # the champion's threshold; 0 where it decides by rate
    parameter_name: str = ""  # rate or threshold
    lag: Count = 0  # records behind the end of the topic
    lag_events: Count = 0  # the same in events, by how many a record has held so far
    # how old is what is read, or for how long no broker has answered
    lag_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    predicted_tokens: Annotated[float, Field(ge=0)] = 0.0  # of drafts with a complete label, by the
    accepted_tokens: Count = 0  # policy in force, and what came of them; since the scope awoke
    lease: str = ""  # who may promote and publish for the scope
    holds_lease: bool = False  # whether that is this learner
    waiting: Count = 0  # policies that wait for the registry, of all scopes
    registry_away_since: Time = 0.0  # 0: it answers
    given_up: Counts = Field(default_factory=dict)  # registrations and moves not made, by reason
    checkpoint_age: Annotated[float, Field(ge=0)] = 0.0  # seconds since one was written
    scopes_awake: Count = 0
    scopes_known: Count = 0
    rollout: str = ""  # trial, watch, or "" where no policy is compared with the champion
    trial_version: Count = 0  # of the policy compared: on watch, the champion before this one
    trial_share: float = 0.0  # of a worker's steps
    trial_ratio: float = 0.0  # its rate over the champion's at the costs in force; 0: no pairs yet
    trial_low: float = 0.0  # bounds of the ratio; 0: too few pairs to give any
    trial_high: float = 0.0
    trial_pairs: Count = 0  # rounds in which both took part
    rounds_refused: Count = 0  # records of the trials topic that are no rounds
    verdicts: Counts = Field(default_factory=dict)  # comparisons that ended, by outcome
    rollout_said: str = ""  # the last move of this learner in the scope, and why


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
        first = error.errors(include_url=False, include_input=False)[0]
        raise ContractError(f"status record refused: {first['msg']}") from error
