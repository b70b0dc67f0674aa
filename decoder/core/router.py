"""The draft router: what each request verifies next, and what became of what it was offered.

The heart of the decoder; it knows no engine. An engine calls, for each request,

    start(request, prompt, options)
    loop:  step(report)               what was committed in, the next drafts out:
               observe(report)            labels resolve
               choose(report)             the next draft of each
           drafted(report, lengths, k)  what the engine made of that
           settle()                   events and the floor, while the target runs
    stop(request, reason)

The router trusts only what the engine reports about a step: a draft that was not made or not
verified costs and brings nothing. A request whose text is not the engine's is left out by itself,
whatever happens to it, and so is one whose bookkeeping fails.

Everything a choice depends on is the prefix, the deterministic cache draft, and labels resolved
before it, never a sampled draft token: so rejection sampling stays lossless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Handles
from decoder.contracts.bundle import CHAMPION, FIRST, MAX_DRAFT, Policy
from decoder.core import cycles, proposer
from decoder.core.choice import Chosen, Step, choose, situation_of
from decoder.core.costs import STALL, LiveCosts
from decoder.core.counters import Counters
from decoder.core.events import Sink
from decoder.core.guards.fallback import fallback_arms
from decoder.core.guards.floor import FLOOR, Floor
from decoder.core.guards.pause import SpeculationPause
from decoder.core.guards.probing import Probing
from decoder.core.payoff.model_arm import START, ModelArm
from decoder.core.rate import LiveRate
from decoder.core.requests import Decision, Decisions, RequestOptions, StepReport
from decoder.core.step_timer import StepTimer
from decoder.core.tracker import Progress, Tracker
from decoder.drafting.drafts import STOCK, Tokens
from decoder.drafting.suffix import SuffixCache
from decoder.experiment.interleaver import Interleaver
from decoder.experiment.variants import Variant
from decoder.policy.pricing import gain_of, plain_steps
from decoder.policy.rule import MODEL
from decoder.telemetry.ring import HEAD

__all__ = ["Counters", "Decision", "DraftRouter", "RequestOptions", "Sink", "StepReport"]


class DraftRouter:
    """Chooses drafts for the requests of one worker and labels every cache draft it saw.

    ``policy`` may be replaced by another thread at any time: it is read once a step, so a step
    never mixes two policies and a swap waits for nothing. ``interleaver``, where there are any, say
    which steps another side decides.
    """

    def __init__(
        self,
        cache: SuffixCache | None,
        policy: Policy,
        token_classes: NDArray[np.float32],
        sink: Sink,
        has_model: bool,
        *,
        model_draft_tokens: int = 4,
        longest: int = MAX_DRAFT,
        costs: LiveCosts | None = None,
        floor: Floor | None = None,
        interleaver: Interleaver | None = None,
        rule: Callable[[Policy, Step], Chosen] = choose,
    ) -> None:
        """Put a router together.

        Args:
            cache: None proposes no cache drafts.
            model_draft_tokens: tokens of a model draft at most, where the engine ``has_model``.
            longest: tokens of any draft at most: what the engine was started for.
            costs: the live table; None for nominal costs that never change.
            floor: None disables fallback, probing and pausing.
            interleaver: of the sides that are compared; None compares none.
            rule: a rival's in the place of :func:`decoder.core.choice.choose`.
        """
        # The shipped policy was trained on other drafters: its prior does not apply here.
        known = policy.model_payoff if policy.role != FIRST else 0.0
        k = min(model_draft_tokens, longest) if has_model else 0
        self.cache, self.policy, self.interleaver, self.floor = cache, policy, interleaver, floor
        self.model_arm = ModelArm(known or START, k)
        classes = np.ascontiguousarray(token_classes, np.float32)
        self.requests = Tracker(cache, sink, self.model_arm, k, classes)
        self.table, self.counters = self.requests.table, self.requests.counters
        self.memories = self.requests.memories
        self.costs = costs or LiveCosts(live=False)
        self.rate = LiveRate()
        self.pause = SpeculationPause() if floor is not None else None
        self.timer = StepTimer()
        self.worth_us: float | None = None
        """Time that model drafts would be worth in the last choice, had all requests been read by
        the drafter; None where the champion did not decide it."""
        self._rule, self._model_len = rule, k
        self._outbox = Handles[cycles.Outbox]()
        self._probing = Probing(self.model_arm)
        self._slots = np.zeros(0, np.int64)  # of the last choice
        self._last = 1, 0  # tokens that the last step ran through the target, and drafted
        own = cache.limits if cache is not None else STOCK
        self._look_up = {
            shown: proposer.look_up_by(limits, longest)
            for shown, limits in (("worker", own), ("stock", STOCK), ("none", None))
        }

    def __contains__(self, request: str) -> bool:
        return request in self.table

    def start(
        self, request: str, prompt: Tokens, options: RequestOptions, output: Sequence[int] = ()
    ) -> None:
        """Begin to follow a request whose prompt is int32 [n].

        Args:
            output: tokens committed before, of a request that is met late.

        Raises:
            ValueError: the request is followed already.
        """
        self.requests.start(request, prompt, options, output)

    def report(
        self,
        names: Sequence[str],
        tokens: Sequence[Sequence[int]] | None = None,
        verified: Sequence[int] | int = 0,
        lengths: Sequence[int] | int = 0,
        step_tokens: int = 0,
    ) -> StepReport:
        """A report of what a step committed, by request: tokens, how many draft tokens were
        verified, and how many tokens the engine holds after it, 0 where it does not say.

        Raises:
            OverflowError: a token is none.
        """
        slots = [self.table.slots.get(name, -1) for name in names]
        committed = tokens if tokens is not None else [()] * len(names)
        return StepReport.of(names, slots, committed, verified, lengths, step_tokens)

    def step(self, report: StepReport) -> Decisions:
        """Take in a step, and decide the next one; as :meth:`observe` and :meth:`choose`."""
        self.observe(report)
        return self.choose(report)

    def observe(self, report: StepReport) -> None:
        """Take in what the last step committed; labels resolve. Mutates ``report``: requests that
        ended with it, or are left out from now on, have no slot any more."""
        # A choice stands for the step that follows it, and for no later one.
        ran, self.timer = self.timer, StepTimer(since=self.timer.since)
        began = ran.since or time.perf_counter()
        step_us = ran.ran_us(began)
        self._count_own_time(ran)
        self._settle()
        self._last = max(report.step_tokens, 1), ran.drafted
        compared = self.interleaver is not None and self.interleaver.comparing
        slots = report.advanced["slot"].copy() if compared else NOBODY
        progress = self.requests.advance(report, step_us, compared)
        self._learn(report, ran, progress, step_us)
        now = self.timer.spent(began)
        if compared and ran.decided and report.names:
            self._compare(report, ran, progress, slots, step_us, now)

    def _compare(
        self,
        report: StepReport,
        ran: StepTimer,
        progress: Progress,
        slots: NDArray[np.int64],
        step_us: float,
        now: float,
    ) -> None:
        """Add a step to the account of the side that decided it; ``slots`` are those of its
        requests, some of which have left by now."""
        assert self.interleaver is not None
        rows, drafts = len(report.names), progress.drafts
        came = ran.came_to(self.costs.table, report.names, drafts, step_us, now, report.usual)
        came = came._replace(tokens=progress.tokens)
        if ran.side is not None:
            made = report.advanced["committed"]
            groups, sessions = self.table.shared(report.names, slots, made)
            came = came._replace(groups=groups, sessions=sessions, predictable=progress.predicted)
        self.interleaver.record_step(ran.side, came, report.step_tokens == rows + drafts)

    def _count_own_time(self, ran: StepTimer) -> None:
        if not ran.decided:
            return
        if _serves(ran.side) and (self.pause is None or self.pause.awake):
            self.costs.proposed(ran.asked, ran.exposed_us)
        self.counters.own_us.append(ran.own_us)
        self.counters.exposed_us.append(ran.exposed_us)

    def _learn(
        self, report: StepReport, ran: StepTimer, progress: Progress, step_us: float
    ) -> None:
        """Learn from a step what steps cost, what the champion commits in their time, and whether
        drafts are worth looking for."""
        rows = len(report.names)
        prefill = report.step_tokens - rows - progress.drafts
        if report.usual and prefill == 0 and ran.decided:
            self.costs.observe(report.step_tokens, rows, ran.drafted, step_us)
        if not (_serves(ran.side) and progress.closed and report.step_tokens):
            return
        table, beside = self.costs.table, max(prefill, 0)
        accepted, drafts = progress.committed - progress.closed, progress.verified
        time_taken = plain_steps(
            table, rows, drafts, ran.drafted, proposes=self.costs.steps > 0, beside=beside
        )
        # a request without a cycle had its one token
        self.rate.observe(rows + accepted, rows, time_taken)
        if self.pause is not None and self.costs.steps:  # else a table has no unit of time yet
            gain_us = gain_of(table, rows, accepted, drafts, ran.drafted, beside=beside)
            usual = STALL * table.proposing(rows) or ran.exposed_us
            self.pause.observe(min(ran.exposed_us, usual), gain_us, rows, table.time(rows))

    def choose(self, report: StepReport) -> Decisions:
        """The next draft of each request of ``report``.

        A request that is not followed, has ended, or switched speculation off verifies nothing.

        Raises:
            Exception: whatever went wrong for the champion; a side for which anything does plays no
                more, and leaves the step to the champion.
        """
        self.timer.begin_choice()
        champion = self.policy
        side = self.interleaver.next_variant(champion) if self.interleaver is not None else None
        try:
            return self._choose(report, side, champion)
        except Exception:
            if side is None or self.interleaver is None or side.name == CHAMPION:
                raise
            # What it did to this step it would do to the next: its block would never end.
            self.requests.limited_log.exception(
                f"variant {side.name!r} is disabled: it could not choose"
            )
            self.interleaver.disable(side)
        return self._choose(report, None, champion)

    def _choose(self, report: StepReport, side: Variant | None, champion: Policy) -> Decisions:
        policy = side.policy if side is not None else champion
        step = self._propose(report, side)
        chosen = (self._rule if _shown(side) == "worker" else choose)(policy, step)
        chosen = self._guard(step, side, chosen)
        return self._open_cycles(step, side, policy, chosen)

    def _propose(self, report: StepReport, side: Variant | None) -> Step:
        """The candidates of the next step, and their cache drafts."""
        awake = self.pause is None or self.pause.awake
        if awake and self.cache is not None:
            self.cache.index()
        self.table.reserve(len(report.names))
        slots = self._slots = np.ascontiguousarray(report.advanced["slot"])
        shown = _shown(side)
        if self.cache is None or (shown == "worker" and not awake):
            shown = "none"
        n, m = proposer.propose(self.requests.state(), slots, self._look_up[shown])
        self.timer.end_proposals()
        offers, live = self.table.offers, len(slots) - slots.tolist().count(-1)
        candidates, batch_size = offers.candidates[:n], live + report.others
        unable = NOBODY
        if report.unable:
            names = [report.names[place] for place in candidates["place"].tolist()]
            candidates["unable"] = [name in report.unable for name in names]
            unable = np.flatnonzero(candidates["unable"])
        prefill = min(report.waiting, max(report.capacity - batch_size, 0))
        situation = situation_of(
            batch_size, self.rate.value, self._model_len, self.costs.table, report.budget, prefill
        )
        self._asked = live
        return Step(
            candidates, offers.drafts[:m], situation, self.costs.table, self.model_arm.odds, unable
        )

    def _guard(self, step: Step, side: Variant | None, chosen: Chosen) -> Chosen:
        """Take the arms that the policy wants, or others; the floor judges the champion, and nobody
        on trial. Mutates ``step``."""
        candidates = step.candidates
        arms = np.ascontiguousarray(candidates["wanted"])
        if _shown(side) == "worker" and self.floor is not None and len(arms):
            if _serves(side):
                arms = fallback_arms(arms, self.floor, candidates)

            def behind() -> NDArray[np.int64]:
                theirs = self.table.arrays.requests[self._slots[candidates["place"]]]
                lag: NDArray[np.int64] = theirs["length"] - theirs["drafted_at"]
                return lag

            probing = self._probing
            arms = probing.at_the_drafter(arms, chosen.model_len, behind, step.unable)
            arms = probing.at_nothing(arms, self.costs, self._last)
            if probing.whole and chosen.model_len < self._model_len:
                chosen = self._lengthen(candidates, chosen)
        candidates["arm"] = arms
        return chosen

    def _lengthen(self, candidates: NDArray[Any], chosen: Chosen) -> Chosen:
        """Give model drafts their full length. Mutates ``candidates``."""
        longest = self._model_len
        candidates["length"][candidates["wanted"] == MODEL] = longest
        candidates["model"][candidates["model"] > 0.0] = self.model_arm.payoff(longest)
        return chosen._replace(model_len=longest)

    def _open_cycles(
        self, step: Step, side: Variant | None, policy: Policy, chosen: Chosen
    ) -> Decisions:
        serves, shown, situation = _serves(side), _shown(side), step.situation
        awake = self.pause is None or self.pause.awake
        self.worth_us = chosen.worth if serves and awake else None
        self.counters.asleep += not awake and shown == "worker"
        self.counters.probes = self._probing.taken
        draft_us = self.timer.end_choice(side, self._asked)
        self.counters.choose_us.append(draft_us)
        self.requests.event[:] = self.requests.sink.step(
            policy, side.name if side is not None else "",
            self.rate.value if policy.kind == "survival" else policy.threshold, time.time(),
            step.batch_size, draft_us,
        )  # fmt: skip
        in_force = serves and self.floor is not None and self.floor.in_force != "policy"
        situation["model_len"], situation["fallback"] = chosen.model_len, in_force
        situation["serves"] = serves
        decided = cycles.open_cycles(
            self.requests.state(), self._slots, len(step.candidates), situation,
            self.costs.table.dense,
        )  # fmt: skip
        models = MODEL in step.candidates["arm"].tobytes()
        self.timer.drafted = chosen.model_len if models else 0
        self.timer.end_decisions()
        return Decisions(decided, self.table.offers.tokens[: len(step.drafts)])

    def drafted(self, report: StepReport, lengths: Sequence[int], k: int) -> None:
        """Take in what the engine made of the last choice.

        Args:
            report: that it was made for.
            lengths: draft tokens that each of its requests really has.
            k: tokens for which the model drafter really ran; 0 if it did not.

        Raises:
            ValueError: they are not as many as its requests.
        """
        if len(lengths) != len(report.names):
            raise ValueError(f"{len(lengths)} drafts for a step of {len(report.names)} requests")
        self.timer.drafted = k
        slots = np.ascontiguousarray(report.advanced["slot"])
        cycles.note_drafted(self.requests.state(), slots, np.array(lengths, np.int64))

    def settle(self, exposed: bool = True) -> None:
        """What the next choice does not need: the floor, and events.

        For an engine to call while the target runs; :meth:`observe` does what is left.

        Args:
            exposed: whether the engine waits for it, as on a CPU, where the target has run by then.
        """
        began = time.perf_counter()
        self._settle()
        self.timer.settled(began, exposed)

    def _settle(self) -> None:
        if self.table.arrays.counts["unsettled"][0]:
            floor = self.floor.state if self.floor is not None else NO_FLOOR
            sink, costs = self.requests.sink, self.costs.table
            outbox = self._outbox.of(cycles.Outbox(sink.raw, sink.control, sink.words))
            sink.control[HEAD] = cycles.settle(
                self.requests.state(), floor, costs.dense, costs.prices, outbox
            )
            sink.written()
        self.table.settled()

    def stop(self, name: str, reason: str) -> None:
        """Stop following a request: its open labels leave censored.

        Unknown names are ignored; never raises.
        """
        self.requests.stop(name, reason)
        if not self.table.slots:
            self.timer.decided = 0.0  # nobody waits for the step any more: a pause begins

    def close(self) -> None:
        """Stop every request: the worker is going down."""
        for name in list(self.table.slots):
            self.stop(name, "abort")
        self._settle()


def _serves(side: Variant | None) -> bool:
    """Whether the champion decides."""
    return side is None or side.name == CHAMPION


def _shown(side: Variant | None) -> str:
    """What drafts a side is shown."""
    return side.draft_source if side is not None else "worker"


NOBODY: Final = np.zeros(0, np.int64)
NO_FLOOR: Final = np.zeros(0, FLOOR)
