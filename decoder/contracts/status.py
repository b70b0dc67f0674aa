"""Status records, which workers and learners publish once a second on the status topic.

Counters are cumulative since the process started, so a lost record loses nothing. Times of steps
(``_us``) are in microseconds, of swaps (``_ms``) in milliseconds. What a worker's field means is
also the help of its metric.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

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


def _at(meaning: str, default: Any = 0) -> Any:
    return Field(default, description=meaning)


def _by(meaning: str) -> Any:
    return Field(default_factory=dict, description=meaning)


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
    life: str = _at("Random id of this process, the same as in its events.", "")
    schema_id: str = ""
    time: Time
    requests_started: Count = _at("Requests begun.")
    requests_stopped: Count = _at("Requests ended.")
    tokens: Count = _at("Tokens committed.")
    cycles: Counts = _by("Decoding cycles, by arm.")
    accepted: Counts = _by("Draft tokens accepted, by arm.")
    drafted: Counts = _by("Draft tokens verified, by arm.")
    drafts_labelled: Count = _at("Cache drafts whose accepted length became known.")
    events_made: Count = _at("Draft events made, one a cycle.")
    events_sent: Count = _at("Draft events acknowledged by the broker.")
    events_in_doubt: Count = _at("Draft events sent, never acknowledged: perhaps on the topic.")
    queue_depth: Count = _at("Draft events waiting, those in flight included.")
    events_spilled: Count = _at("Of version 0.2.0, which kept events in files.")
    events_dropped: Count = _at("Draft events that the worker dropped.")
    drops: Counts = _by("Draft events that the worker dropped, by reason.")
    events_refused: Counts = _by("Draft events that the broker refused for good, by reason.")
    events_failed: Count = _at("Draft events left when the worker closed.")
    events_former: Count = _at("Of version 0.2.0.")
    former_lost: Counts = _by("Of version 0.2.0.")
    former_unread: Count = _at("Of version 0.2.0.")
    carrier_deaths: Count = _at("Deaths of the exporter process, which is restarted.")
    policy_version: Count = _at("Version of the serving policy.")
    publication: Count = _at("Number of its publication; 0: shipped with the worker.")
    policy_role: str = ""
    policy_applied_at: Time = _at("When the serving policy was applied, in s since the epoch.", 0.0)
    policy_kind: str = ""
    threshold: float = _at("Decision parameter of a threshold policy.", 0.0)
    rate: float = _at("Decision parameter of a survival policy, tokens a plain step.", 0.0)
    fallback: str = _at("The fixed arm that the no-regret floor serves, if any.", "")
    fallbacks: Count = _at("Times the no-regret floor replaced the policy by a fixed arm.")
    returned_from: Count = _at("Publication of a champion that the policy before it replaces.")
    advantage: float = _at("Time of the best fixed arm over the policy's: above 1 is ahead.", 1.0)
    probes: Count = _at("Steps decided only to measure the drafter, or a step without drafts.")
    setup: str = _at("Where the cost table was measured.", "")
    step_us: dict[StepTokens, Count] = _by("Cost of a step by its tokens.")
    draft_us: float = _at("Time that the model drafter adds to a step.", 0.0)
    swaps: Count = _at("Policies applied.")
    swap_ms_max: float = _at("Longest time from a bundle received to that bundle serving.", 0.0)
    refusals: Counts = _by("Policy bundles refused, by reason.")
    ignored: Counts = _by("Policy bundles skipped, by reason: older, leap, role, any.")
    choose_us_p50: float = _at("Median time to propose, predict and decide for a step.", 0.0)
    own_us_p50: float = _at("Median time of all work of router and adapter in a step.", 0.0)
    exposed_us_p50: float = _at("Median time of that work that the engine waits for.", 0.0)
    asleep: Count = _at("Steps without a search for drafts, since none pays (paused).")
    undrafted: Count = _at("Model drafts chosen but not made.")
    grafts: Count = _at("Of version 0.2.0.")
    left_out: dict[str, Count] = _by("Requests excluded from drafting, by reason.")
    cache_bytes: Count = _at("Bytes of the suffix caches, at most.")
    cache_evicted: Count = _at("Pages of earlier outputs evicted from the suffix caches.")
    cache_shed: Count = _at("Pages of running requests' own text evicted.")
    faults: Count = _at("Steps in which hybrid decoding failed and the worker decoded plainly.")
    sides: dict[str, SideSums] = _by("By variant; other steps: outside.")
    side: str = _at("Variant that decides now; empty outside of a comparison.", "")
    sides_failed: Counts = _by("Faults of a variant, which is then excluded.")
    trial_version: Count = _at("Of the policy on trial; 0: none.")
    trial_publication: Count = 0
    trial_share: float = _at("Share of steps that it is given.", 0.0)
    rounds_made: Count = 0
    rounds_sent: Count = _at("Rounds acknowledged by the broker.")
    rounds_dropped: Count = _at("Rounds dropped by a full queue, or refused.")

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
