"""Cycles as they pass from the decoding process to the carrier: numbers in tuples, little work.

What costs time, an event of thirty columns, is made where they arrive. What many cycles share, the
step and the request's names, is told once.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from decoder.contracts.events import DraftEvent
from decoder.policy.rule import ARMS, CACHE, NONE


class ToldStep(NamedTuple):
    """What the cycles of a step share, named as in :class:`DraftEvent`."""

    time: float
    side: str
    parameter: float
    policy_version: int
    publication: int
    role: str
    parameter_name: str
    batch_size: int
    step_tokens: int
    draft_us: float
    step_us: float


class ToldNames(NamedTuple):
    """Pseudonyms of a request, and which of its choices it is."""

    request: str
    tenant: str
    session: str
    choice: int
    workload: str


class ToldCycle(NamedTuple):
    """One cycle; ``step`` and ``names`` are places in the lists beside it.

    ``arm`` is the number of the one in force; ``features`` float32 bytes, None without a draft.
    """

    number: int
    step: int
    names: int
    arm: int
    cycle: int
    position: int
    draft_len: int
    drafted_len: int
    verified_len: int
    accepted: int
    censored: str
    model_accepted: int | None
    predicted: float
    predicted_model: float
    features: Any


class Told(NamedTuple):
    """Some cycles, oldest first, and what they share. Plain tuples do: they are made in haste."""

    steps: list[Any]
    names: list[Any]
    cycles: list[Any]


def events_of(told: Told) -> list[DraftEvent]:
    """The event of each cycle."""
    steps = [ToldStep(*step) for step in told.steps]
    names = [ToldNames(*named) for named in told.names]
    events = []
    for told_cycle in told.cycles:
        (
            number, at, who, arm, cycle, position, draft_len, drafted_len, verified_len,
            accepted, censored, model_accepted, predicted, predicted_model, features,
        ) = told_cycle  # fmt: skip
        step, named = steps[at], names[who]
        seen = arm == CACHE and (accepted < verified_len or verified_len >= draft_len)
        events.append(
            DraftEvent(
                number=number,
                time=step.time,
                request=named.request,
                tenant=named.tenant,
                session=named.session,
                choice=named.choice,
                workload=named.workload,
                cycle=cycle,
                position=position,
                policy_version=step.policy_version,
                publication=step.publication,
                role=step.role,
                side=step.side,
                parameter=step.parameter,
                parameter_name=step.parameter_name,
                predicted=predicted,
                predicted_model=predicted_model,
                arm=ARMS[arm if verified_len else NONE],
                draft_len=draft_len,
                drafted_len=max(drafted_len, verified_len),
                verified_len=verified_len,
                accepted=accepted,
                label=("verified" if seen else "hindsight") if draft_len else "",
                censored=censored,
                model_accepted=model_accepted,
                batch_size=step.batch_size,
                step_tokens=step.step_tokens,
                draft_us=step.draft_us,
                step_us=step.step_us,
                share=1.0,
                features=np.frombuffer(features, np.float32) if draft_len else None,
            )
        )
    return events


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=np.generic.item)
_DECODER: Final = msgspec.msgpack.Decoder()


def encode(told: Told) -> bytes:
    """``told`` as MessagePack."""
    return _ENCODER.encode(told)


def decode(data: bytes) -> Told:
    """Inverse of :func:`encode`."""
    return Told(*_DECODER.decode(data))
