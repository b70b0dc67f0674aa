"""What a finished cycle tells, once it is known what became of its cache draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from decoder.contracts.events import LIMITS, DraftEvent
from decoder.contracts.features import NUM_FEATURES
from decoder.core.floor import Floor, Outcome
from decoder.core.labels import Label
from decoder.core.loops import part
from decoder.core.requests import Cycle, Request, RequestOptions, Step
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CACHE, MODEL
from decoder.telemetry.told import Told, ToldStep, events_of


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
    k, batch, beside = step.model_len, step.batch, step.beside

    def cache(length: int, total: int) -> Outcome:
        return 1.0 + min(accepted, length), part(batch, length, total, 0.0, 1, beside, dense)

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
            return 1.0 + payoff, part(batch, length, total, drafting, sharing, beside, dense)

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


Resolved = tuple[int, str, RequestOptions, Label[Cycle], str]
"""A cycle of which all is known, told by :func:`tell` where decoding does not wait for it.

How many cycles were before it in this life of the worker; the request's name and its options; the
label of its cache draft, of 0 tokens without one; and why that is incomplete, or "". A plain tuple,
since decoding makes one in every cycle: a named one takes five times as long."""


class EventSink(Protocol):
    """Where finished events go. ``put`` never blocks and never raises."""

    def put(self, resolved: Resolved) -> None:
        """Take one event to be."""


def tell(resolved: Sequence[Resolved]) -> Told:
    """``resolved`` as it is passed on: this runs beside decoding, half a microsecond a cycle."""
    told = Told([], [], [])
    known: dict[int, tuple[Any, ...]] = {}
    named: dict[int, int] = {}
    add, last = told.cycles.append, None
    for number, name, options, (cycle, accepted, _), censored in resolved:
        step = cycle.step
        if step is not last:
            last = step
            found = known.get(id(step))
            if found is None:
                rows = np.ascontiguousarray(step.features, np.float32).reshape(-1).view("B").data
                found = (
                    len(told.steps), rows, step.arms, step.expected.tolist(), step.model.tolist()
                )  # fmt: skip
                known[id(step)] = found
                told.steps.append(_shared(step))
            at, features, arms, expected, model = found
        who = named.get(id(options))
        if who is None:
            who = named[id(options)] = len(told.names)
            told.names.append(
                (options.opaque or name, options.tenant, options.session, options.choice,
                 options.workload)
            )  # fmt: skip
        row, begin, length = cycle.row, cycle.draft * _BYTES, cycle.draft_len
        add((
            number, at, who, arms[row], cycle.index, cycle.position, length, cycle.drafted_len,
            cycle.verified_len, accepted, censored, cycle.model_accepted, expected[row],
            model[row], features[begin : begin + _BYTES] if length else None,
        ))  # fmt: skip
    return told


_TELLABLE: Final = LIMITS["parameter"]
"""A threshold beyond it, which a policy may have, means as much: all or nothing."""
_BYTES: Final = NUM_FEATURES * 4
"""Of a feature vector."""


def _shared(step: Step) -> ToldStep:
    policy = step.policy
    return ToldStep(
        time=step.wall,
        side=step.side,
        parameter=min(max(step.parameter, _TELLABLE[0]), _TELLABLE[1]),
        policy_version=policy.version if policy else 0,
        publication=policy.publication if policy else 0,
        role=policy.role if policy else "",
        parameter_name=policy.parameter_name if policy else "",
        batch_size=step.batch,
        step_tokens=step.tokens,
        draft_us=step.draft_us,
        step_us=step.us,
    )


def event_of(resolved: Resolved) -> DraftEvent:
    """The event of a cycle."""
    return events_of(tell([resolved]))[0]
