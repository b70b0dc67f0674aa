"""What a finished cycle tells, once it is known what became of its cache draft."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from decoder.choice import part
from decoder.contracts.events import DraftEvent
from decoder.floor import Floor, Outcome
from decoder.labels import Label
from decoder.policy.pricing import CostTable
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE
from decoder.requests import Cycle, Request, RequestOptions


def outcomes_of(
    cycle: Cycle, accepted: int, model_payoff: float, costs: CostTable
) -> tuple[Outcome, Outcome, Outcome, Outcome]:
    """What each of the floor's options would have made of ``cycle``, in their order.

    A model draft that was to be made and was not (the drafter failed, the scheduler had no room)
    would have come about for no option: it brings nothing, and costs drafting if that was done.

    Args:
        accepted: of its cache draft, tokens.
        model_payoff: what a model draft has to expect here; one that was verified says more.
    """
    step, dense = cycle.step, costs.dense
    k, batch = step.model_len, step.batch

    def cache(length: int, total: int) -> Outcome:
        return 1.0 + min(accepted, length), part(batch, length, total, 0.0, 1, dense)

    none = cache(0, 0)
    model = policy = none
    if k:
        seen = cycle.model_accepted
        payoff, length = float(seen) if seen is not None else model_payoff, k
        drafting = costs.drafting(k, batch)
        if cycle.arm == MODEL and not cycle.verified_len:
            payoff, length = 0.0, 0
            drafting = drafting if cycle.drafted_len else 0.0

        def drafted(total: int, sharing: int) -> Outcome:
            return 1.0 + payoff, part(batch, length, total, drafting, sharing, dense)

        model = drafted(k * batch, batch)
        if cycle.wanted == MODEL:
            policy = drafted(step.wanted, step.drafting)
    if cycle.wanted == CACHE:
        policy = cache(cycle.wanted_len, step.wanted)
    return policy, none, model, cache(cycle.draft_len, step.cached)


def weigh(floor: Floor | None, costs: CostTable, request: Request, label: Label[Cycle]) -> None:
    """Tell ``floor`` what each option would have made of a cycle; of a trial's it learns nothing.

    Mutates the floor.
    """
    cycle = label.subject
    if floor is None or not cycle.committed or not cycle.step.serves:
        return
    foreseen = outcomes_of(cycle, label.accepted, float(cycle.step.model[cycle.row]), costs)
    floor.add(request.stretch, cycle.committed, foreseen, cycle.step.batch)


class Resolved(NamedTuple):
    """A cycle of which all is known; made where decoding waits, read by :func:`event_of` elsewhere.

    ``number`` counts the cycles before it in this life of the worker. ``label`` is of its cache
    draft, a cycle without one having a label of 0 tokens; ``censored`` says why it is incomplete.
    """

    number: int
    name: str
    options: RequestOptions
    label: Label[Cycle]
    censored: str


class EventSink(Protocol):
    """Where finished events go. ``put`` never blocks and never raises."""

    def put(self, resolved: Resolved) -> None:
        """Take one event to be."""


def event_of(resolved: Resolved) -> DraftEvent:
    """The event of a cycle."""
    number, name, options, label, censored = resolved
    cycle = label.subject
    step, policy = cycle.step, cycle.step.policy
    seen = cycle.arm == CACHE and (
        label.accepted < cycle.verified_len or cycle.verified_len >= cycle.draft_len
    )
    return DraftEvent(
        number=number,
        time=step.wall,
        request=options.opaque or name,
        tenant=options.tenant,
        session=options.session,
        choice=options.choice,
        workload=options.workload,
        cycle=cycle.index,
        position=cycle.position,
        policy_version=policy.version if policy else 0,
        publication=policy.publication if policy else 0,
        role=policy.role if policy else "",
        side=step.side,
        parameter=step.parameter,
        parameter_name=policy.parameter_name if policy else "",
        predicted=float(step.expected[cycle.row]),
        predicted_model=float(step.model[cycle.row]),
        arm=ARMS[cycle.arm if cycle.verified_len else NONE],
        draft_len=cycle.draft_len,
        drafted_len=max(cycle.drafted_len, cycle.verified_len),
        verified_len=cycle.verified_len,
        accepted=label.accepted,
        label=("verified" if seen else "hindsight") if cycle.draft_len else "",
        censored=censored,
        model_accepted=cycle.model_accepted,
        batch_size=step.batch,
        step_tokens=step.tokens,
        draft_us=step.draft_us,
        step_us=step.us,
        features=step.features[cycle.draft] if cycle.draft_len else None,
    )
