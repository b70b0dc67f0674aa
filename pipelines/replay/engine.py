"""The recorded engine: a decoder whose target and drafter are a recording.

Under greedy decoding the target's continuation does not depend on what was drafted, so a recorded
output, with the model draft's accepted length at each of its positions, tells what any policy would
have committed, cycle by cycle. Drafts, features, decisions and labels are the router's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from decoder.choice import choose
from decoder.contracts.bundle import MAX_DRAFT, Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.events import DraftEvent
from decoder.contracts.features import FloatArray
from decoder.costs import LiveCosts
from decoder.engines.reference.method import Method
from decoder.floor import Floor
from decoder.labels import common_prefix
from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import ARMS, MODEL, NONE
from decoder.router import Committed, Decision, DraftRouter, EventSink, RequestOptions
from decoder.settings import WorkerSettings
from learner.rows import from_events, joined
from pipelines.replay.dialogue import DialogueCache, Turn, turns
from pipelines.replay.model_arm import model_acceptance
from pipelines.replay.states import UNLIMITED, ListSink, Progress, States
from pipelines.replay.tally import Cycles
from pipelines.replay.traces import Trace
from pipelines.replay.verified import verified

_ARM: Final = {name: number for number, name in enumerate(ARMS)}


def simulate(
    traces: Sequence[Trace],
    warm_up: Sequence[Trace],
    method: Method,
    token_classes: FloatArray,
    settings: WorkerSettings,
    model_mean: float | None = None,
    costs: CostTable = NOMINAL,
    progress: Progress | None = None,
    floor: Floor | None = None,
    watch: EventSink | None = None,
) -> tuple[Cycles, States]:
    """Decode ``traces`` by ``method``, one after the other.

    Args:
        warm_up: decoded first, so that the cache and the memory hold them; not in the result.
        model_mean: accepted length of model drafts where a recording does not hold it.
        costs: what the policy believes that cycles cost, and never corrects.
        floor: as of a worker, with its looks; None lets the policy have its way.
        watch: is given every cycle too; requests are named by their number, warm-up included.

    Returns:
        the cycles, and the labelled cache drafts that were proposed in them.

    Raises:
        TraceError: the method is none of one chain of drafts, or a recording lacks the model arm.
    """
    if method.oracle or method.model == "tree":
        raise TraceError(f"method {method.name!r} cannot be simulated from recordings.")
    rule = method.rule() if method.rule is not None else None
    cache, sink = DialogueCache(method.drafting(settings)), ListSink(rule, watch)
    has_model = method.model == "chain"
    longest = min(settings.model_draft_tokens, method.model_limit or MAX_DRAFT)
    router = DraftRouter(
        cache,
        method.policy,
        token_classes,
        sink,
        has_model,
        model_draft_tokens=longest,
        costs=LiveCosts(costs, live=False),
        floor=floor,
        grafts=bool(method.graft),
        choice=rule or choose,
    )
    cycles: list[tuple[int, int, int, int, int, int, int]] = []
    states: list[States] = [_states([], 0)]
    for turn in turns([*warm_up, *traces], cache, start=False):
        mine = list(Decoding(router, turn, has_model, model_mean).cycles())
        index = turn.index - len(warm_up)
        if index >= 0:
            cycles += [(index, *cycle) for cycle in mine]
            states.append(_states(sink.events, index))
        sink.events.clear()
        if progress is not None:
            progress(len(turn.output))
    trace, position, arm, lengths, accepted, committed, tail = (
        np.array(cycles, np.int32).reshape(-1, 7).T
    )
    return (
        Cycles(trace, position, arm.astype(np.int8), lengths, accepted, committed, tail),
        States(
            joined([s.rows for s in states]),
            np.concatenate([s.trace for s in states]),
            np.concatenate([s.position for s in states]),
        ),
    )


def hybrid(name: str, policy: Policy) -> Method:
    """Cache drafts and a chain of model drafts, decided between by ``policy``."""
    return Method(name, policy, "chain")


def _states(events: Sequence[DraftEvent], index: int) -> States:
    ordered = sorted((e for e in events if e.draft_len), key=lambda e: e.position)
    positions = np.array([e.position for e in ordered], np.int32)
    return States(from_events(ordered), np.full(len(ordered), index, np.int32), positions)


class Cycle(NamedTuple):
    """One cycle of a recording: the columns of :class:`Cycles` behind the first."""

    position: int
    arm: int
    verified: int
    accepted: int
    committed: int
    tail: int

    @property
    def drafted(self) -> int:
        """Tokens that the model drafter made."""
        return self.verified - self.tail if self.arm == MODEL else 0


class Decoding:
    """One recording under way. A verified draft is compared with what was recorded."""

    def __init__(
        self, router: DraftRouter, turn: Turn, has_model: bool, mean: float | None
    ) -> None:
        self._router, self._turn = router, turn
        self._model = model_acceptance(turn.trace, mean).tolist() if has_model else []
        if router.grafts and turn.trace.model_drafts is None:
            raise TraceError(
                f"session {turn.trace.session} was recorded without the tokens of model drafts: "
                "replay it without grafting."
            )

    def cycles(self) -> Iterator[Cycle]:
        """Decode it: each cycle before the router observes what came of it. Mutates the router."""
        router, turn = self._router, self._turn
        options = RequestOptions(
            turn.trace.allowed, UNLIMITED, session=turn.trace.session, workload=turn.trace.workload
        )
        router.start(turn.name, turn.prompt, options)
        router.observe([Committed(turn.name, turn.output[:1], 0)], len(turn.prompt))
        done = 1
        while done < len(turn.output):
            (decision,) = router.choose([turn.name])
            length, accepted, tail = self._verify(decision, done)
            committed = turn.output[done : done + accepted + 1]
            arm, came = _ARM[decision.arm] if length else NONE, len(committed)
            cycle = Cycle(done, arm, length, min(accepted, came), came, tail)
            router.drafted([turn.name], [length], cycle.drafted)
            yield cycle
            router.observe([Committed(turn.name, committed, length)], 1 + length)
            done += came
        router.stop(turn.name, "stop")
        router.settle()

    def _verify(self, decision: Decision, done: int) -> tuple[int, int, int]:
        """Draft tokens verified and accepted after ``done`` output tokens; and in a tail."""
        output = self._turn.output
        length, accepted = verified(decision, output, self._model, done)
        if decision.arm != "model":
            return length, accepted, 0
        tail = self._tail(length, done)
        if accepted == length:
            accepted += common_prefix(tail, output[done + length : done + length + len(tail)])
        return length + len(tail), accepted, len(tail)

    def _tail(self, length: int, done: int) -> list[int]:
        """What is verified behind the model draft of ``length`` tokens after ``done``."""
        drafts = self._turn.trace.model_drafts
        if not self._router.grafts or drafts is None or len(drafts[done]) < length:
            return []
        (tail,) = self._router.graft([self._turn.name], [drafts[done][:length]])
        return tail
