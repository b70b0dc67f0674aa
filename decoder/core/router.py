"""The draft router: chooses a draft for each request and labels every cache draft it saw.

Independent of the engine, which calls

    start(request, prompt, options)
    loop:  observe(report)              committed tokens in: resolve labels
           choose(report)               the next draft of each request
           drafted(report, lengths, k)  what the engine really drafted
           flush()                      events and the floor, while the target runs
    stop(request, reason)

A cycle is one verification of the target model for one request; an arm is what it verifies: a
cache draft, a model draft or nothing. A draft's features are computed in
:mod:`decoder.core.proposer`, are listed once, in :mod:`decoder.contracts.features`, and reach the
policy as ``Step.features``. Labels resolve in :meth:`decoder.core.tracker.Tracker.advance`; the
policy predicts and chooses in :func:`decoder.core.choice.choose`; the controller may override it.
The floor is the part of the controller that decides while the policy does worse than a fixed arm.

The router trusts only what the engine reports about a step: a draft that was not made or not
verified has no cost and no gain. A request whose length differs from the engine's is dropped on its
own; so is one whose bookkeeping fails.

A choice depends only on the prefix, the deterministic cache draft and labels resolved earlier,
never on a sampled draft token. So rejection sampling stays lossless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import CHAMPION, FIRST, MAX_DRAFT, Policy
from decoder.core import cycles, proposer
from decoder.core.choice import Chosen, Step, choose, inputs_of
from decoder.core.costs import STALL, LiveCosts
from decoder.core.counters import Counters
from decoder.core.events import Sink
from decoder.core.guards.controller import Controller
from decoder.core.guards.probation import COMPARED, Probation, weight_of
from decoder.core.payoff.model_arm import START, ModelArm
from decoder.core.rate import LiveRate
from decoder.core.requests import ADVANCED, Decision, Decisions, RequestOptions, StepReport
from decoder.core.step_timer import StepTimer
from decoder.core.tracker import Progress, Tracker
from decoder.drafting.matches import STOCK
from decoder.drafting.suffix import SuffixCache
from decoder.experiment.interleaver import Interleaver
from decoder.experiment.variants import Variant
from decoder.policy.pricing import step_time
from decoder.policy.rule import MODEL
from decoder.telemetry.ring import HEAD

__all__ = ["Counters", "Decision", "DraftRouter", "RequestOptions", "Sink", "StepReport"]


class DraftRouter:
    """Chooses drafts for the requests of one worker and labels every cache draft it saw.

    Attributes:
        policy: of the champion. Another thread may replace it at any time: it is read once a step,
            so a step never mixes two policies and a swap waits for nothing.
        costs: nominal costs that never change, until the owner sets others.
        interleaver: selects the steps that another variant decides; None compares none.
        rule: how the champion's policy decides; replaced for baselines.
        model_gain_us: gain in time of model drafts in the last choice, if the drafter had prefilled
            all requests; None if the champion did not decide it.
    """

    def __init__(
        self,
        cache: SuffixCache | None,
        policy: Policy,
        token_classes: NDArray[np.float32],
        sink: Sink,
        *,
        model_len: int = 0,
        longest: int = MAX_DRAFT,
        guarded: bool = False,
    ) -> None:
        """Create a router without requests.

        Args:
            cache: None for no cache drafts.
            model_len: maximum length of a model draft, 0 without a model drafter.
            longest: maximum length of any draft, the one the engine was started with.
            guarded: whether the controller may override the policy, probe and pause.
        """
        # The shipped policy was trained on other drafters: its prior does not apply here.
        model_payoff = policy.model_payoff if policy.role != FIRST else 0.0
        k = self._model_len = min(model_len, longest)
        self.cache, self.policy, self.costs = cache, policy, LiveCosts(live=False)
        self.interleaver: Interleaver | None = None
        self.rule: Callable[[Policy, Step], Chosen] = choose
        self.model_arm = ModelArm(model_payoff or START, k)
        classes = np.ascontiguousarray(token_classes, np.float32)
        self.requests = Tracker(cache, sink, self.model_arm, k, classes)
        self.start = self.requests.start
        self.counters, self.memories = self.requests.counters, self.requests.memories
        self.controller = Controller(self.model_arm, guarded)
        self.probation = Probation(self.requests.table.counts["probation"], policy, guarded)
        self._sampled: Step | None = None  # the last step, where the former policy is evaluated
        self.rate, self.timer = LiveRate(), StepTimer()
        self.model_gain_us: float | None = None
        self._champion = Variant("", policy)  # outside of a round
        self._slots = np.zeros(0, np.int64)  # of the last choice
        self._num_tracked = 0  # requests of it
        own = cache.limits if cache is not None else STOCK
        self._limits = {"worker": own, "stock": STOCK, "none": STOCK._replace(most=0)}
        self._longest = longest

    def __contains__(self, request: str) -> bool:
        return request in self.requests.slots

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
        slots = [self.requests.slots.get(name, -1) for name in names]
        committed = tokens if tokens is not None else [()] * len(names)
        advanced = np.zeros(len(names), ADVANCED)
        advanced["slot"], advanced["verified"], advanced["length"] = slots, verified, lengths
        advanced["end"] = [*accumulate(map(len, committed))]
        flat = np.array([*chain.from_iterable(committed)], np.int32)
        return StepReport(names, flat, advanced, step_tokens, others=slots.count(-1))

    def observe(self, report: StepReport) -> None:
        """Process the committed tokens of the last step; labels resolve. Mutates ``report``: ended
        and dropped requests get slot -1."""
        # A choice is valid for the next step only.
        previous, self.timer = self.timer, StepTimer(since=self.timer.since)
        start = previous.since or time.perf_counter()
        step_us = previous.step_us(start)
        self._flush()
        variant, interleaver = previous.variant, self.interleaver
        in_round = bool(previous.decided and variant is not None and variant.name)
        progress = self.requests.advance(report, step_us, in_round)
        if previous.decided:
            self.counters.own_us.append(previous.own_us)
            self.counters.exposed_us.append(previous.exposed_us)
        self._learn(report, previous, progress, step_us)
        now = self.timer.add(start)
        if previous.decided and report.names and interleaver is not None and interleaver.comparing:
            step = previous.outcome(self.costs.table, report, progress, (step_us, now))
            decodes_only = report.step_tokens == len(report.names) + progress.drafts
            interleaver.record_step(variant, step, decodes_only)

    def _learn(
        self, report: StepReport, timer: StepTimer, progress: Progress, step_us: float
    ) -> None:
        """Update costs, the champion's rate and the pause with a step."""
        costs, controller, rows = self.costs, self.controller, len(report.names)
        decides, exposed_us = _champion_decides(timer.variant), timer.exposed_us
        if timer.decided and decides and controller.proposes:
            costs.proposed(timer.requests, exposed_us)
        prefill = report.step_tokens - rows - progress.drafts
        if report.timed and prefill == 0 and timer.decided:
            costs.observe(report.step_tokens, rows, timer.drafted, step_us)
        if not (decides and progress.closed and report.step_tokens):
            return
        table, accepted = costs.table, progress.committed - progress.closed
        plain_us, own_us = table.time(rows), table.own_us * rows
        time_us = step_time(table, rows, progress.verified, timer.drafted, max(prefill, 0))
        # a request without a cycle committed one token
        spent_us = time_us + own_us * (costs.steps > 0)
        self.rate.observe(rows + accepted, rows, spent_us / plain_us)
        if costs.steps:  # costs are nominal until the first measured step
            # a stall of the host is no property of the decision
            own_us = min(exposed_us, STALL * own_us or exposed_us)
            gain = accepted / rows - (time_us / plain_us - 1.0)
            controller.observe(own_us / plain_us, gain, rows, plain_us)

    def choose(self, report: StepReport) -> Decisions:
        """Choose the next draft of each request of ``report``.

        A request that is not tracked, has ended, or disabled speculation verifies nothing.

        Raises:
            Exception: any failure under the champion. A variant that fails is disabled, and the
                champion decides the step.
        """
        self.timer.begin_choice()
        interleaver, policy = self.interleaver, self._serving()
        if self._champion.policy is not policy:
            self._champion = Variant("", policy)
        variant = interleaver.next_variant(policy) if interleaver is not None else None
        try:
            return self._choose(report, variant or self._champion)
        except Exception:
            if interleaver is None or variant is None or variant.name == CHAMPION:
                raise
            # It would fail in every step, and its block would never end.
            self.requests.limited_log.exception(
                f"variant {variant.name!r} is disabled: it could not choose"
            )
            interleaver.disable(variant)
        return self._choose(report, self._champion)

    def _serving(self) -> Policy:
        """The policy that decides; another one than before is on probation."""
        champion = self.policy
        if champion is not self.probation.champion and self.probation.begin(champion):
            table = self.requests.table
            table.requests["compared"] = np.zeros((), COMPARED)
            table.requests["window"]["weight"] = table.cycles["step"]["former_weight"] = 0
        return self.probation.serving(champion)

    def _choose(self, report: StepReport, variant: Variant) -> Decisions:
        step = self._propose(report, variant)
        rule = self.rule if variant.draft_source == "worker" else choose
        chosen, decides = rule(variant.policy, step), _champion_decides(variant)
        self.model_gain_us = chosen.model_gain if decides and self.controller.proposes else None
        step.candidates["arm"] = step.candidates["policy_arm"]
        if variant.draft_source == "worker":
            chosen = self.controller.override(step, chosen, decides, self.costs)
        evaluates = decides and self.controller.proposes
        sampled = evaluates and self.probation.samples(int(step.inputs["batch_size"][0]))
        self._sampled = step if sampled else None
        return self._open_cycles(step, variant, chosen)

    def _propose(self, report: StepReport, variant: Variant) -> Step:
        """Collect the next step's candidates and their cache drafts."""
        source, proposes = variant.draft_source, self.controller.proposes
        if proposes and self.cache is not None:
            self.cache.index()
        slots = self._slots = np.ascontiguousarray(report.advanced["slot"])
        if self.cache is None or (source == "worker" and not proposes):
            source = "none"
        n, m = proposer.propose(self.requests.handle, slots, self._longest, self._limits[source])
        self.timer.proposed = time.perf_counter()
        offers = self.requests.state.offers
        self._num_tracked = len(slots) - slots.tolist().count(-1)
        candidates, batch_size = offers.candidates[:n], self._num_tracked + report.others
        if report.unable:
            places = candidates["place"].tolist()
            candidates["unable"] = [report.names[place] in report.unable for place in places]
        prefill = min(report.waiting, max(report.capacity - batch_size, 0))
        inputs = inputs_of(
            batch_size, self.rate.value, self._model_len, self.costs.table, report.budget, prefill
        )
        return Step(candidates, offers.drafts[:m], inputs, self.costs.table, self.model_arm.odds)

    def _open_cycles(self, step: Step, variant: Variant, chosen: Chosen) -> Decisions:
        inputs, interleaver = step.inputs, self.interleaver
        draft_us = self.timer.end_choice(variant, self._num_tracked)
        self.counters.choose_us.append(draft_us)
        in_block = variant.name and interleaver is not None
        block = interleaver.number if in_block else -1  # type: ignore[union-attr]
        self.requests.state.event[:] = self.requests.sink.step(
            variant, block, self.rate.value, int(inputs["batch_size"][0]), draft_us
        )
        inputs["model_len"], inputs["serves"] = chosen.model_len, _champion_decides(variant)
        handle, n, dense = self.requests.handle, len(step.candidates), self.costs.table.dense
        decisions = cycles.open_cycles(handle, self._slots, n, inputs, dense)
        models = MODEL in step.candidates["arm"].tobytes()
        self.timer.drafted = chosen.model_len if models else 0
        self.timer.end_decisions()
        return Decisions(decisions, self.requests.state.offers.tokens[: len(step.drafts)])

    def drafted(self, report: StepReport, lengths: Sequence[int], k: int) -> None:
        """Record what the engine drafted for the choice of ``report``: the draft tokens that each
        request really has, and for how many the model drafter really ran, 0 if it did not.

        Raises:
            ValueError: ``lengths`` does not match the requests.
        """
        if len(lengths) != len(report.names):
            raise ValueError(f"{len(lengths)} drafts for a step of {len(report.names)} requests")
        self.timer.drafted = k
        slots = np.ascontiguousarray(report.advanced["slot"])
        cycles.note_drafted(self.requests.handle, slots, np.array(lengths, np.int64))

    def flush(self, exposed: bool = True) -> None:
        """Update the floor and write events, which the next choice does not need. The engine calls
        it while the target runs, or waits for it (``exposed``), as on a CPU."""
        start = time.perf_counter()
        self._flush()
        self.timer.add(start, exposed)

    def _flush(self) -> None:
        if self._sampled is not None:
            step, self._sampled = self._sampled, None
            choice = self.probation.choose(step, self._model_len)
            weight = weight_of(int(step.inputs["batch_size"][0]))
            cycles.note_former(self.requests.table, self._slots, choice, weight)
        if self.requests.table.counts["completed"][0]:
            sink, costs, floor = self.requests.sink, self.costs.table, self.controller.floor
            sink.control[HEAD] = cycles.write_events(
                self.requests.handle, floor.state, costs.dense, costs.prices, sink.outbox
            )
            sink.written()
            if self.probation.settle():
                floor.serving, floor.state["ahead"] = "policy", 0.0
        self.requests.release_slots()

    def stop(self, name: str, reason: str) -> None:
        """As :meth:`decoder.core.tracker.Tracker.stop`."""
        self.requests.stop(name, reason)
        if not self.requests.slots:
            self.timer.decided = 0.0  # the engine is idle from here on

    def close(self) -> None:
        """Stop every request: the worker shuts down."""
        for name in list(self.requests.slots):
            self.stop(name, "abort")
        self._flush()


def _champion_decides(variant: Variant | None) -> bool:
    return variant is None or variant.name in ("", CHAMPION)
