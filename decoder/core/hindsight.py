"""What a finished cycle tells, once it is known what became of its cache draft."""

from __future__ import annotations

from typing import Any, Final, Protocol

from decoder.complaints import Complaints
from decoder.contracts.events import LIMITS, VEILED, DraftEvent, LabelKind, veiled
from decoder.core.floor import Floor, Outcome
from decoder.core.labels import Label
from decoder.core.loops import part
from decoder.core.requests import Cycle, Request, RequestOptions, Step
from decoder.policy.pricing import CostTable
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE
from decoder.telemetry import ring as rings
from decoder.telemetry.ring import NAMES, STEP, UNREADABLE, Ring, packed


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
"""A cycle of which all is known.

How many cycles were before it in this life of the worker; the request's name and its options; the
label of its cache draft, of 0 tokens without one; and why that is incomplete, or "". A plain tuple,
since decoding makes one in every cycle: a named one takes five times as long."""


class EventSink(Protocol):
    """Where finished events go. ``put`` never blocks and never raises."""

    def put(self, resolved: Resolved) -> None:
        """Take one event to be."""


class Nowhere:
    """A sink that keeps nothing."""

    def put(self, resolved: Resolved) -> None:
        """Take one event to be."""


class RingSink:
    """Writes a row for each cycle; what cannot be written is counted in the ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._arms = [ring.word(arm) for arm in ARMS]
        self._labels = [ring.word(label) for label in LABELS]
        self._names: dict[int, tuple[RequestOptions, str, bytes]] = {}  # packed, by id of options
        self._complaints = Complaints()

    def put(self, resolved: Resolved) -> None:
        """Write one row."""
        number, name, options, (cycle, accepted, _), censored = resolved
        try:
            step = cycle.step
            told = step.told
            if told is None or told[0] != step.us or told[1] != step.tokens:  # it ran since
                told = step.told = self._step(step)
            known = self._names.get(id(options))
            if known is None or known[1] != name:
                known = self._request(name, options)
            _, _, shared, features, expected, model = told
            row, length, seen = cycle.row, cycle.draft_len, cycle.model_accepted
            arm, label, drafted = _seen(cycle, accepted)
            own = (
                number, expected[row], model[row], 1.0, cycle.index, cycle.position, length,
                drafted, cycle.verified_len, accepted, -1 if seen is None else seen,
                self._arms[arm], self._labels[label],
                self._ring.word(censored) if censored else 0,
            )  # fmt: skip
            at = cycle.draft * _BYTES
            self._ring.write(own, shared, known[2], features[at : at + _BYTES] if length else b"")
        except Exception:  # noqa: BLE001 -- told by the complaints
            self._complaints.exception("no event can be made of a cycle")
            self._ring.control[UNREADABLE] += 1

    def _step(self, step: Step) -> tuple[Any, ...]:
        values = shared(step)
        for name in rings.SPELLED:
            if name in values:
                values[name] = self._ring.word(values[name])
        features = step.features.astype("f4").tobytes()
        foreseen = step.expected.tolist(), step.model.tolist()
        return step.us, step.tokens, packed(STEP, values), features, *foreseen

    def _request(self, name: str, options: RequestOptions) -> tuple[RequestOptions, str, bytes]:
        if len(self._names) >= _REQUESTS:
            self._names.clear()
        told = names(name, options)
        for kind in VEILED:
            told[kind] = veiled(kind, told[kind]).encode()
        self._names[id(options)] = found = (options, name, packed(NAMES, told))
        return found


LABELS: Final[tuple[LabelKind, ...]] = ("", "verified", "hindsight")
_TELLABLE: Final = LIMITS["parameter"]
"""A threshold beyond it, which a policy may have, means as much: all or nothing."""
_BYTES: Final = rings.ROW["features"].itemsize
"""Of a feature vector."""
_REQUESTS: Final = 4096
"""Requests whose names are kept packed."""


def _seen(cycle: Cycle, accepted: int) -> tuple[int, int, int]:
    """Arm and kind of label by number, and draft tokens made of a cycle, as its event has them."""
    verified, length, drafted = cycle.verified_len, cycle.draft_len, cycle.drafted_len
    arm = cycle.step.arms[cycle.row]
    label = 2 if length else 0
    if arm == CACHE and length and (accepted < verified or verified >= length):
        label = 1
    return arm if verified else NONE, label, drafted if drafted > verified else verified


def shared(step: Step) -> dict[str, Any]:
    """What the events of a step share, by the names of :class:`DraftEvent`."""
    policy = step.policy
    return {
        "time": step.wall,
        "side": step.side,
        "parameter": min(max(step.parameter, _TELLABLE[0]), _TELLABLE[1]),
        "policy_version": policy.version if policy else 0,
        "publication": policy.publication if policy else 0,
        "role": policy.role if policy else "",
        "parameter_name": policy.parameter_name if policy else "",
        "batch_size": step.batch,
        "step_tokens": step.tokens,
        "draft_us": step.draft_us,
        "step_us": step.us,
    }


def names(name: str, options: RequestOptions) -> dict[str, Any]:
    """What the events of a request share."""
    return {
        "request": options.opaque or name,
        "tenant": options.tenant,
        "session": options.session,
        "workload": options.workload,
        "choice": options.choice,
    }


def event_of(resolved: Resolved) -> DraftEvent:
    """The event of a cycle."""
    number, name, options, (cycle, accepted, _), censored = resolved
    step, length = cycle.step, cycle.draft_len
    arm, label, drafted = _seen(cycle, accepted)
    return DraftEvent(
        number=number,
        cycle=cycle.index,
        position=cycle.position,
        predicted=float(step.expected[cycle.row]),
        predicted_model=float(step.model[cycle.row]),
        arm=ARMS[arm],
        draft_len=length,
        drafted_len=drafted,
        verified_len=cycle.verified_len,
        accepted=accepted,
        label=LABELS[label],
        censored=censored,
        model_accepted=cycle.model_accepted,
        share=1.0,
        features=step.features[cycle.draft].astype("f4") if length else None,
        **shared(step),
        **names(name, options),
    )
