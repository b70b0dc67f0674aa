"""Events as cycles are told, for tests that begin with events."""

from __future__ import annotations

from collections.abc import Sequence

from decoder.contracts.events import DraftEvent
from decoder.policy.rule import ARMS
from decoder.telemetry import frames, told
from decoder.telemetry.frames import Frame
from decoder.telemetry.told import Told, ToldCycle, ToldNames, ToldStep


def tell(events: Sequence[DraftEvent]) -> Told:
    """What :func:`told.events_of` makes ``events`` of."""
    steps = [ToldStep(*(getattr(e, name) for name in ToldStep._fields)) for e in events]
    names = [ToldNames(*(getattr(e, name) for name in ToldNames._fields)) for e in events]
    cycles = []
    for place, e in enumerate(events):
        features = e.features.tobytes() if e.features is not None else None
        own = {name: getattr(e, name) for name in ToldCycle._fields if hasattr(e, name)}
        own |= {"step": place, "names": place, "arm": ARMS.index(e.arm), "features": features}
        cycles.append(ToldCycle(**own))
    return Told(steps, names, cycles)


def frame(events: Sequence[DraftEvent]) -> Frame:
    """The frame that holds ``events``."""
    return Frame(frames.EVENTS, len(events), told.encode(tell(events)))
