"""The draft router: chooses a draft for each request and labels every cache draft it saw.

Independent of the engine, which calls

    start(request, prompt, options)
    loop:  step(report)               committed tokens in, next drafts out:
               observe(report)            resolve labels
               choose(report)             choose the next draft of each request
           drafted(report, lengths, k)  what the engine really drafted
           settle()                   events and the floor, while the target runs
    stop(request, reason)

The router trusts only what the engine reports about a step: a draft that was not made or not
verified has no cost and no gain. A request whose length differs from the engine's is dropped on its
own; so is one whose bookkeeping fails.

A choice depends only on the prefix, the deterministic cache draft and labels resolved earlier,
never on a sampled draft token. So rejection sampling stays lossless.
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

    Another thread may replace ``policy`` at any time. It is read once a step, so a step never mixes
    two policies and a swap waits for nothing. ``interleaver``, if any, selects the steps that
    another variant decides.
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
        """Create a router without requests.

        Args:
            cache: None for no cache drafts.
            model_draft_tokens: maximum length of a model draft, if the engine ``has_model``.
            longest: maximum length of any draft, the one the engine was started with.
            costs: None for nominal costs that never change.
            floor: None disables fallback, probing and pausing.
            interleaver: assigns steps to variants; None compares none.
            rule: replaces :func:`decoder.core.choice.choose`, for baselines.
        """
        # The shipped policy was trained on other drafters: its prior does not apply here.
        model_payoff = policy.model_payoff if policy.role != FIRST else 0.0
        k = min(model_draft_tokens, longest) if has_model else 0
        self.cache, self.policy, self.interleaver, self.floor = cache, policy, interleaver, floor
        self.model_arm = ModelArm(model_payoff or START, k)
        classes = np.ascontiguousarray(token_classes, np.float32)
        self.requests = Tracker(cache, sink, self.model_arm, k, classes)
        self.table, self.counters = self.requests.table, self.requests.counters
        self.memories = self.requests.memories
        self.costs = costs or LiveCosts(live=False)
        self.rate = LiveRate()
        self.pause = SpeculationPause() if floor is not None else None
        self.timer = StepTimer()
        self.worth_us: float | None = None
        """Gain in time of model drafts in the last choice, if the drafter had prefilled all
        requests; None if the champion did not decide it."""
        self._rule, self._model_len = rule, k
        self._outbox = Handles[cycles.Outbox]()
        self._probing = Probing(self.model_arm)
        self._slots = np.zeros(0, np.int64)  # of the last choice
        self._last = 1, 0  # of the last step: tokens run through the target, tokens drafted
        own = cache.limits if cache is not None else STOCK
        self._look_up = {
            source: proposer.look_up_by(limits, longest)
            for source, limits in (("worker", own), ("stock", STOCK), ("none", None))
        }

    def __contains__(self, request: str) -> bool:
        return request in self.table

    def start(
        self, request: str, prompt: Tokens, options: RequestOptions, output: Sequence[int] = ()
    ) -> None:
        """As :meth:`decoder.core.tracker.Tracker.start`."""
        self.requests.start(request, prompt, options, output)

    def report(
        self,
        names: Sequence[str],
        tokens: Sequence[Sequence[int]] | None = None,
        verified: Sequence[int] | int = 0,
        lengths: Sequence[int] | int = 0,
        step_tokens: int = 0,
    ) -> StepReport:
        """Build a step report from per-request committed tokens, numbers of verified draft tokens,
        and lengths that the engine holds after the step (0 if unknown).

        Raises:
            OverflowError: a token id is out of range.
        """
        slots = [self.table.slots.get(name, -1) for name in names]
        committed = tokens if tokens is not None else [()] * len(names)
        return StepReport.of(names, slots, committed, verified, lengths, step_tokens)

    def step(self, report: StepReport) -> Decisions:
        """Observe a step and decide the next one: :meth:`observe`, then :meth:`choose`."""
        self.observe(report)
        return self.choose(report)

    def observe(self, report: StepReport) -> None:
        """Process the committed tokens of the last step; labels resolve. Mutates ``report``: ended
        and dropped requests get slot -1."""
        # A choice is valid for the next step only.
        previous, self.timer = self.timer, StepTimer(since=self.timer.since)
        start = previous.since or time.perf_counter()
        step_us = previous.ran_us(start)
        self._count_own_time(previous)
        self._settle()
        self._last = max(report.step_tokens, 1), previous.drafted
        compared = self.interleaver is not None and self.interleaver.comparing
        slots = report.advanced["slot"].copy() if compared else NOBODY
        progress = self.requests.advance(report, step_us, compared)
        self._learn(report, previous, progress, step_us)
        now = self.timer.spent(start)
        if compared and previous.decided and report.names:
            self._compare(report, previous, progress, slots, step_us, now)

    def _compare(
        self,
        report: StepReport,
        timer: StepTimer,
        progress: Progress,
        slots: NDArray[np.int64],
        step_us: float,
        now: float,
    ) -> None:
        """Record a step for the variant that decided it; ``slots`` are those before its requests
        ended."""
        assert self.interleaver is not None
        rows, drafts = len(report.names), progress.drafts
        outcome = timer.came_to(self.costs.table, report.names, drafts, step_us, now, report.usual)
        outcome = outcome._replace(tokens=progress.tokens)
        if timer.side is not None:
            committed = report.advanced["committed"]
            groups, sessions = self.table.shared(report.names, slots, committed)
            outcome = outcome._replace(
                groups=groups, sessions=sessions, predictable=progress.predicted
            )
        self.interleaver.record_step(timer.side, outcome, report.step_tokens == rows + drafts)

    def _count_own_time(self, timer: StepTimer) -> None:
        if not timer.decided:
            return
        if _serves(timer.side) and (self.pause is None or self.pause.awake):
            self.costs.proposed(timer.asked, timer.exposed_us)
        self.counters.own_us.append(timer.own_us)
        self.counters.exposed_us.append(timer.exposed_us)

    def _learn(
        self, report: StepReport, timer: StepTimer, progress: Progress, step_us: float
    ) -> None:
        """Update costs, the champion's rate and the speculation pause with a step."""
        rows = len(report.names)
        prefill = report.step_tokens - rows - progress.drafts
        if report.usual and prefill == 0 and timer.decided:
            self.costs.observe(report.step_tokens, rows, timer.drafted, step_us)
        if not (_serves(timer.side) and progress.closed and report.step_tokens):
            return
        table, beside = self.costs.table, max(prefill, 0)
        accepted, drafts = progress.committed - progress.closed, progress.verified
        plain = plain_steps(
            table, rows, drafts, timer.drafted, proposes=self.costs.steps > 0, beside=beside
        )
        # a request without a cycle committed one token
        self.rate.observe(rows + accepted, rows, plain)
        if self.pause is not None and self.costs.steps:  # before, the table has no time unit
            gain_us = gain_of(table, rows, accepted, drafts, timer.drafted, beside=beside)
            usual = STALL * table.proposing(rows) or timer.exposed_us
            self.pause.observe(min(timer.exposed_us, usual), gain_us, rows, table.time(rows))

    def choose(self, report: StepReport) -> Decisions:
        """Choose the next draft of each request of ``report``.

        A request that is not tracked, has ended, or disabled speculation verifies nothing.

        Raises:
            Exception: any failure under the champion. A variant that fails is disabled, and the
                champion decides the step.
        """
        self.timer.begin_choice()
        champion = self.policy
        variant = self.interleaver.next_variant(champion) if self.interleaver is not None else None
        try:
            return self._choose(report, variant, champion)
        except Exception:
            if variant is None or self.interleaver is None or variant.name == CHAMPION:
                raise
            # It would fail in every step, and its block would never end.
            self.requests.limited_log.exception(
                f"variant {variant.name!r} is disabled: it could not choose"
            )
            self.interleaver.disable(variant)
        return self._choose(report, None, champion)

    def _choose(self, report: StepReport, variant: Variant | None, champion: Policy) -> Decisions:
        policy = variant.policy if variant is not None else champion
        step = self._propose(report, variant)
        chosen = (self._rule if _draft_source(variant) == "worker" else choose)(policy, step)
        chosen = self._guard(step, variant, chosen)
        return self._open_cycles(step, variant, policy, chosen)

    def _propose(self, report: StepReport, variant: Variant | None) -> Step:
        """Collect the next step's candidates and their cache drafts."""
        awake = self.pause is None or self.pause.awake
        if awake and self.cache is not None:
            self.cache.index()
        self.table.reserve(len(report.names))
        slots = self._slots = np.ascontiguousarray(report.advanced["slot"])
        source = _draft_source(variant)
        if self.cache is None or (source == "worker" and not awake):
            source = "none"
        n, m = proposer.propose(self.requests.state(), slots, self._look_up[source])
        self.timer.end_proposals()
        offers, live = self.table.offers, len(slots) - slots.tolist().count(-1)
        candidates, batch_size = offers.candidates[:n], live + report.others
        unable = NOBODY
        if report.unable:
            names = [report.names[index] for index in candidates["place"].tolist()]
            candidates["unable"] = [name in report.unable for name in names]
            unable = np.flatnonzero(candidates["unable"])
        prefill = min(report.waiting, max(report.capacity - batch_size, 0))
        situation = situation_of(
            batch_size, self.rate.value, self._model_len, self.costs.table, report.budget, prefill
        )
        self._num_tracked = live
        return Step(
            candidates, offers.drafts[:m], situation, self.costs.table, self.model_arm.odds, unable
        )

    def _guard(self, step: Step, variant: Variant | None, chosen: Chosen) -> Chosen:
        """Apply the guards to the policy's arms. The fallback applies to the champion only. Mutates
        ``step``."""
        candidates = step.candidates
        arms = np.ascontiguousarray(candidates["wanted"])
        if _draft_source(variant) == "worker" and self.floor is not None and len(arms):
            if _serves(variant):
                arms = fallback_arms(arms, self.floor, candidates)

            def unread() -> NDArray[np.int64]:
                requests = self.table.arrays.requests[self._slots[candidates["place"]]]
                lag: NDArray[np.int64] = requests["length"] - requests["drafted_at"]
                return lag

            probing = self._probing
            arms = probing.at_the_drafter(arms, chosen.model_len, unread, step.unable)
            arms = probing.at_nothing(arms, self.costs, self._last)
            if probing.whole and chosen.model_len < self._model_len:
                chosen = self._lengthen(candidates, chosen)
        candidates["arm"] = arms
        return chosen

    def _lengthen(self, candidates: NDArray[Any], chosen: Chosen) -> Chosen:
        """Lengthen model drafts to the maximum. Mutates ``candidates``."""
        longest = self._model_len
        candidates["length"][candidates["wanted"] == MODEL] = longest
        candidates["model"][candidates["model"] > 0.0] = self.model_arm.payoff(longest)
        return chosen._replace(model_len=longest)

    def _open_cycles(
        self, step: Step, variant: Variant | None, policy: Policy, chosen: Chosen
    ) -> Decisions:
        serves, source, situation = _serves(variant), _draft_source(variant), step.situation
        awake = self.pause is None or self.pause.awake
        self.worth_us = chosen.worth if serves and awake else None
        self.counters.asleep += not awake and source == "worker"
        self.counters.probes = self._probing.taken
        draft_us = self.timer.end_choice(variant, self._num_tracked)
        self.counters.choose_us.append(draft_us)
        block = "", -1
        if variant is not None and self.interleaver is not None:
            block = variant.name, self.interleaver.number
        self.requests.event[:] = self.requests.sink.step(
            policy, block,
            self.rate.value if policy.kind == "survival" else policy.threshold, time.time(),
            step.batch_size, draft_us,
        )  # fmt: skip
        in_force = serves and self.floor is not None and self.floor.in_force != "policy"
        situation["model_len"], situation["fallback"] = chosen.model_len, in_force
        situation["serves"] = serves
        decisions = cycles.open_cycles(
            self.requests.state(), self._slots, len(step.candidates), situation,
            self.costs.table.dense,
        )  # fmt: skip
        models = MODEL in step.candidates["arm"].tobytes()
        self.timer.drafted = chosen.model_len if models else 0
        self.timer.end_decisions()
        return Decisions(decisions, self.table.offers.tokens[: len(step.drafts)])

    def drafted(self, report: StepReport, lengths: Sequence[int], k: int) -> None:
        """Record what the engine drafted for the last choice.

        Args:
            report: of that choice.
            lengths: draft tokens that each of its requests really has.
            k: tokens for which the model drafter really ran; 0 if it did not.

        Raises:
            ValueError: ``lengths`` does not match the requests.
        """
        if len(lengths) != len(report.names):
            raise ValueError(f"{len(lengths)} drafts for a step of {len(report.names)} requests")
        self.timer.drafted = k
        slots = np.ascontiguousarray(report.advanced["slot"])
        cycles.note_drafted(self.requests.state(), slots, np.array(lengths, np.int64))

    def settle(self, exposed: bool = True) -> None:
        """Update the floor and write events, which the next choice does not need.

        The engine calls it while the target runs; :meth:`observe` does the rest.

        Args:
            exposed: whether the engine waits for it, as on a CPU, where the target has already run.
        """
        start = time.perf_counter()
        self._settle()
        self.timer.settled(start, exposed)

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
        """Stop tracking a request: its open labels are censored.

        Unknown names are ignored; never raises.
        """
        self.requests.stop(name, reason)
        if not self.table.slots:
            self.timer.decided = 0.0  # the engine is idle from here on

    def close(self) -> None:
        """Stop every request: the worker shuts down."""
        for name in list(self.table.slots):
            self.stop(name, "abort")
        self._settle()


def _serves(variant: Variant | None) -> bool:
    """Whether the champion decides."""
    return variant is None or variant.name == CHAMPION


def _draft_source(variant: Variant | None) -> str:
    """Source of a variant's drafts: "worker", "stock" or "none"."""
    return variant.draft_source if variant is not None else "worker"


NOBODY: Final = np.zeros(0, np.int64)
NO_FLOOR: Final = np.zeros(0, FLOOR)
