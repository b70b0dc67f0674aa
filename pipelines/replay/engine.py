"""The recorded engine: a decoder whose target and drafter are recordings.

Under greedy decoding the target's continuation does not depend on what was drafted, so a recorded
output, with the model draft's accepted length at each of its positions, tells what any policy would
have committed, cycle by cycle. Drafts, features, decisions and labels are the router's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from decoder.choice import choose
from decoder.contracts.bundle import MAX_DRAFT, Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.events import DraftEvent
from decoder.contracts.features import FloatArray
from decoder.costs import LiveCosts
from decoder.engines.reference.method import Method
from decoder.floor import Floor
from decoder.hindsight import Resolved, event_of
from decoder.labels import common_prefix
from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import ARMS, NONE
from decoder.router import Committed, Decision, DraftRouter, EventSink, RequestOptions
from decoder.settings import WorkerSettings
from learner.rows import Rows, from_events
from pipelines.replay.cycles import Cycle, Cycles
from pipelines.replay.dialogue import UNLIMITED, DialogueCache, Turn
from pipelines.replay.model_arm import model_acceptance
from pipelines.replay.traces import Trace

Told = Callable[[int, int], None]
"""Told how many output tokens are decoded, and how many there are."""


@dataclass
class _Running:
    turn: Turn
    model: Sequence[int]
    done: int = 1

    def verify(self, decision: Decision) -> Cycle:
        """What becomes of ``decision``: a draft is compared with what was recorded."""
        output, done = self.turn.output, self.done
        length = accepted = 0
        if decision.arm == "cache":
            length = len(decision.tokens)
            accepted = common_prefix(decision.tokens, output[done : done + length])
        elif decision.arm == "model":
            length = decision.room
            accepted = min(self.model[done], length)
        came = len(output[done : done + accepted + 1])
        arm = ARMS.index(decision.arm) if length else NONE
        return Cycle(self.turn.index, done, arm, length, min(accepted, came), came)


class Engine:
    """Requests under way, named by their number, in a router that is given.

    A step is :meth:`decide`, then :meth:`commit`; between the two its cycles can be dated.
    """

    def __init__(
        self,
        router: DraftRouter,
        cache: DialogueCache,
        traces: Sequence[Trace],
        has_model: bool = True,
        model_mean: float | None = None,
    ) -> None:
        """Nothing is under way yet. The router sleeps no more: that weighs this machine's time.

        Args:
            cache: the router's.
            model_mean: accepted length of model drafts where a recording does not hold it.
        """
        router.doze = None
        self.running: dict[str, _Running] = {}
        self._router, self._cache, self._traces = router, cache, traces
        self._has_model, self._mean = has_model, model_mean
        self._left = Counter(trace.session for trace in traces)
        self._cycles: list[Cycle] = []

    def start(self, index: int, tenant: str = "") -> None:
        """Begin recording number ``index``, whose first token comes with its prompt. One that has
        no other ends at once.

        Raises:
            TraceError: it lacks the model arm.
        """
        trace = self._traces[index]
        turn = Turn.of(index, trace)
        model = model_acceptance(trace, self._mean).tolist() if self._has_model else []
        self._cache.trees.expect(trace.session, turn.text)
        options = RequestOptions(
            trace.allowed, UNLIMITED, session=trace.session, workload=trace.workload, tenant=tenant
        )
        self._router.start(turn.name, turn.prompt, options)
        self._router.observe([Committed(turn.name, turn.output[:1], 0)], 0)
        self.running[turn.name] = _Running(turn, model)
        if len(turn.output) == 1:
            self._end(turn)

    def decide(self) -> list[Cycle]:
        """The next cycle of each request under way, before the router observes what came of it."""
        names = list(self.running)
        decisions = zip(self.running.values(), self._router.choose(names), strict=True)
        self._cycles = [one.verify(decision) for one, decision in decisions]
        # The drafter makes as many tokens for each request of the step that asked.
        k = max(c.drafted for c in self._cycles)
        self._router.drafted(names, [c.verified for c in self._cycles], k)
        return self._cycles

    def commit(self, usual: bool = True) -> Iterator[int]:
        """Commit what :meth:`decide` told; the number of each request that is over, just stopped.

        Args:
            usual: false keeps the router from learning costs by this machine's clock, and has
                labels told at once, not in the next step.
        """
        outcomes, over = [], []
        for cycle, one in zip(self._cycles, list(self.running.values()), strict=True):
            tokens = one.turn.output[one.done : one.done + cycle.committed]
            outcomes.append(Committed(one.turn.name, tokens, cycle.verified))
            one.done += cycle.committed
            if one.done >= len(one.turn.output):
                over.append(one.turn)
        self._router.observe(outcomes, len(outcomes) + sum(c.verified for c in self._cycles), usual)
        if not usual:
            self._router.settle()
        for turn in over:
            self._end(turn)
            yield turn.index

    def decode(self, index: int) -> Iterator[Cycle]:
        """One recording alone, from its start to its end."""
        self.start(index)
        while self.running:
            yield from self.decide()
            list(self.commit())

    def _end(self, turn: Turn) -> None:
        self._router.stop(turn.name, "stop")
        self._router.settle()
        del self.running[turn.name]
        self._left[turn.trace.session] -= 1
        if not self._left[turn.trace.session]:
            self._cache.trees.forget(turn.trace.session)


class _Sink:
    """Keeps the events of cache drafts, and hands every cycle on to those who listen."""

    def __init__(self, *listening: EventSink | None) -> None:
        self.events: list[DraftEvent] = []
        self._listening: Final = [sink for sink in listening if sink is not None]

    def put(self, resolved: Resolved) -> None:
        """Take one event."""
        _, _, _, (cycle, _, _), _ = resolved
        if cycle.draft_len:
            self.events.append(event_of(resolved))
        for sink in self._listening:
            sink.put(resolved)


@dataclass(frozen=True)
class Simulator:
    """Decodes recordings one after the other.

    ``model_mean`` is the accepted length of model drafts where a recording does not hold it,
    ``costs`` what policies believe that cycles cost, and never correct.
    """

    token_classes: FloatArray
    settings: WorkerSettings
    model_mean: float | None = None
    costs: CostTable = NOMINAL

    def decode(
        self,
        traces: Sequence[Trace],
        method: Method,
        warm_up: Sequence[Trace] = (),
        told: Told | None = None,
        floor: Floor | None = None,
        watch: EventSink | None = None,
    ) -> tuple[Cycles, Rows]:
        """The cycles of ``traces`` by ``method``, and the labelled cache drafts proposed in them.

        Args:
            warm_up: decoded first, so that cache and memory hold them; not in the result.
            floor: as of a worker, with its looks; None lets the policy have its way.
            watch: is given every cycle too; requests are named by their number, warm-up included.

        Raises:
            TraceError: the method is none of one chain of drafts, or a recording lacks the model
                arm.
        """
        if method.oracle or method.model == "tree":
            raise TraceError(f"method {method.name!r} cannot be simulated from recordings.")
        rule = method.rule() if method.rule is not None else None
        cache, sink = DialogueCache(method.drafting(self.settings)), _Sink(rule, watch)
        has_model = method.model == "chain"
        router = DraftRouter(
            cache,
            method.policy,
            self.token_classes,
            sink,
            has_model,
            model_draft_tokens=min(
                self.settings.model_draft_tokens, method.model_limit or MAX_DRAFT
            ),
            costs=LiveCosts(self.costs, live=False),
            floor=floor,
            choice=rule or choose,
        )
        every = [*warm_up, *traces]
        engine = Engine(router, cache, every, has_model, self.model_mean)
        cycles: list[Cycle] = []
        done, whole, warm = 0, sum(len(t.output) for t in every), len(warm_up)
        for index, trace in enumerate(every):
            mine = list(engine.decode(index))
            if index >= warm:
                cycles += [c._replace(trace=index - warm) for c in mine]
            done += len(trace.output)
            if told is not None:
                told(done, whole)
        asked = [(int(e.request), e.position, e) for e in sink.events]
        kept = sorted(((i, p, e) for i, p, e in asked if i >= warm), key=lambda each: each[:2])
        return Cycles.of(cycles), from_events([event for *_, event in kept])


def hybrid(name: str, policy: Policy) -> Method:
    """Cache drafts and a chain of model drafts, decided between by ``policy``."""
    return Method(name, policy, "chain")
