"""What a finished cycle tells, once it is known what became of its cache draft."""

from __future__ import annotations

from decoder.choice import part
from decoder.contracts.events import DraftEvent
from decoder.floor import Outcome
from decoder.labels import Label
from decoder.policy.pricing import CostTable
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE
from decoder.requests import Cycle, Request


def outcomes_of(
    cycle: Cycle, accepted: int, model_payoff: float, costs: CostTable
) -> tuple[Outcome, Outcome, Outcome, Outcome]:
    """What each of the floor's options would have made of ``cycle``, in their order.

    A model draft that was to be made and was not (the drafter failed, the scheduler had no room)
    would have come about for no option: it brings nothing and costs what drafting did.

    Args:
        accepted: of its cache draft, tokens.
        model_payoff: what a model draft has to expect here; one that was verified says more.
    """
    dense = costs.dense
    k, batch, step = cycle.model_len, cycle.batch_size, cycle.step

    def cache(length: int, total: int) -> Outcome:
        return 1.0 + min(accepted, length), part(batch, length, total, 0.0, 1, dense)

    none = cache(0, 0)
    model = policy = none
    if k:
        seen = cycle.model_accepted
        payoff, length = float(seen) if seen is not None else model_payoff, k
        if cycle.arm == MODEL and not cycle.verified_len:
            payoff, length = 0.0, 0
        drafting = costs.drafting(k, batch)

        def drafted(total: int, sharing: int) -> Outcome:
            return 1.0 + payoff, part(batch, length, total, drafting, sharing, dense)

        model = drafted(k * batch, batch)
        if cycle.wanted == MODEL:
            policy = drafted(step.wanted, step.drafting)
    if cycle.wanted == CACHE:
        policy = cache(cycle.wanted_len, step.wanted)
    return policy, none, model, cache(cycle.draft_len, step.cached)


def event_of(event_id: str, request: Request, label: Label[Cycle], censored: str) -> DraftEvent:
    """The event of a labelled cache draft; ``censored`` says why its label is incomplete."""
    cycle = label.subject
    assert cycle.features is not None
    seen = cycle.arm == CACHE and (
        label.accepted < cycle.verified_len or cycle.verified_len >= cycle.draft_len
    )
    return DraftEvent(
        event_id=event_id,
        time=cycle.wall,
        request=request.name,
        workload=request.options.workload,
        cycle=cycle.index,
        position=cycle.position,
        policy_version=cycle.policy_version,
        threshold=cycle.parameter,
        predicted=cycle.predicted,
        predicted_model=cycle.predicted_model,
        arm=ARMS[cycle.arm if cycle.verified_len else NONE],
        draft_len=cycle.draft_len,
        verified_len=cycle.verified_len,
        accepted=label.accepted,
        label="verified" if seen else "hindsight",
        censored=censored,
        model_accepted=cycle.model_accepted,
        batch_size=cycle.batch_size,
        step_tokens=cycle.step_tokens,
        draft_us=cycle.draft_us,
        step_us=cycle.step_us,
        features=cycle.features,
    )
