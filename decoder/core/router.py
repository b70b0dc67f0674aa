"""The draft router: what each request verifies next, and what became of what it was offered.

The heart of the decoder; it knows no engine. An engine calls, for each request,

    start(request, prompt, options)
    loop:  observe(requests and what was committed)   labels resolve
           choose(requests)                           the next draft of each
           drafted(requests and their drafts)         what the engine made of that
           settle()                                   events and accounts, while the target runs
    stop(request, reason)

It believes of a step what the engine tells of it, and nothing else: a draft that was not made or
not verified costs and brings nothing. A request whose text is not the engine's is left out by
itself, whatever happens to it, and so is one whose bookkeeping fails.

Everything a choice depends on is the prefix, the deterministic cache draft, and labels resolved
before it, never a sampled draft token: so rejection sampling stays lossless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import CHAMPION, FIRST, MAX_DRAFT, Policy
from decoder.core import cycles, proposing
from decoder.core.choice import Chosen, choose
from decoder.core.costs import LiveCosts
from decoder.core.counters import Counters
from decoder.core.events import Sink
from decoder.core.following import Following
from decoder.core.guards.floor import Floor
from decoder.core.guards.pause import SpeculationPause
from decoder.core.guards.probing import Probing, relieved
from decoder.core.payoff.model_arm import START, ModelArm
from decoder.core.rate import LiveRate
from decoder.core.requests import Committed, Decision, Decisions, Outcomes, RequestOptions
from decoder.core.table import DRAFTED_AT, LENGTH, UNSETTLED
from decoder.core.underway import Underway
from decoder.drafting.drafts import STOCK, Limits
from decoder.drafting.suffix import SuffixCache
from decoder.experiment.interleaver import Interleaver
from decoder.experiment.variants import Variant
from decoder.policy.pricing import MAX_TOKENS, gain_of, plain_steps
from decoder.policy.rule import MODEL, Arms
from decoder.telemetry.ring import HEAD, SETTLED

__all__ = ["Committed", "Counters", "Decision", "DraftRouter", "RequestOptions", "Sink"]


class DraftRouter(Following):
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
        choice: Callable[..., Chosen] = choose,
    ) -> None:
        """Put a router together.

        Args:
            cache: None proposes no cache drafts.
            model_draft_tokens: tokens of a model draft at most, where the engine ``has_model``.
            longest: tokens of any draft at most: what the engine was started for.
            costs: the live table; None for nominal costs that never change.
            floor: None lets the policy have its way whatever it costs, looks at nothing, and never
                sleeps.
            interleaver: of the sides that are compared; None compares none.
            choice: a rival's rule in the place of :func:`decoder.core.choice.choose`.
        """
        # A first policy was made with drafters of its own: it knows nothing of this one.
        known = policy.model_payoff if policy.role != FIRST else 0.0
        k = min(model_draft_tokens, longest) if has_model else 0
        super().__init__(cache, sink, ModelArm(known or START, k), k)
        self.policy, self.interleaver, self.floor = policy, interleaver, floor
        self.costs = costs or LiveCosts(live=False)
        self.rate = LiveRate()
        self._classes = np.ascontiguousarray(token_classes, np.float32)
        self._choice, self._longest = choice, longest
        self.pause = SpeculationPause() if floor is not None else None
        self._probing = Probing(self.model_arm, self._model_len > 0)
        self.underway = Underway()
        self._last = 1, 0  # tokens that the last step ran through the target, and drafted
        self.worth_us: float | None = None
        """Time that model drafts would be worth in the last choice, had all requests been read by
        the drafter; None where the champion did not decide it."""

    def observe(
        self, outcomes: Outcomes | Sequence[Committed], step_tokens: int, usual: bool = True
    ) -> None:
        """Take in what the last step committed; labels resolve.

        Args:
            outcomes: one entry for each request the step advanced.
            step_tokens: tokens the step ran through the target, prefill included; 0 for tokens
                that no step made, of which nothing is learned about time.
            usual: False where the step also did work that had waited: it says nothing of costs.
        """
        began = self.underway.since or time.perf_counter()
        if not isinstance(outcomes, Outcomes):
            outcomes = Outcomes.of(outcomes)
        # A choice stands for the step that follows it, and for no later one.
        ran, self.underway = self.underway, Underway(since=self.underway.since)
        serves = ran.side is None or ran.side.name == CHAMPION
        step_us = ran.ran_us(began)
        if ran.decided:
            if serves and (self.pause is None or self.pause.awake):
                self.costs.proposed(ran.asked, ran.exposed_us)
            self.counters.own_us.append(ran.own_us)
            self.counters.exposed_us.append(ran.exposed_us)
        self._settle()
        self._last = max(step_tokens, 1), ran.drafted
        rows, known = len(outcomes.names), self.counters.tokens
        slots = self.table.of(outcomes.names)
        compared = self.interleaver is not None and self.interleaver.comparing
        made, sums = self._take(outcomes, slots.copy(), step_tokens, step_us, compared)
        closed, brought, closed_verified, verified, foretold = sums
        decoding_alone = step_tokens == rows + verified
        if usual and decoding_alone and ran.decided:
            self.costs.observe(step_tokens, rows, ran.drafted, step_us)
        if serves and closed and step_tokens:
            beside = max(step_tokens - rows - verified, 0)
            self._reckon(brought - closed, closed_verified, ran, rows, beside)
        now = self.underway.spent(began)
        if ran.decided and rows and self.interleaver is not None and compared:
            came = ran.came_to(
                self.costs.table, outcomes.names, verified, self.counters.tokens - known, step_us,
                now, usual,
            )  # fmt: skip
            if ran.side is not None:
                groups, sessions = self.table.shared(outcomes.names, slots, made)
                came = came._replace(groups=groups, sessions=sessions, predictable=foretold)
            self.interleaver.record_step(ran.side, came, decoding_alone)

    def _reckon(self, drafted: int, verified: int, ran: Underway, rows: int, beside: int) -> None:
        """Let rate and pause know what the champion's step of ``rows`` requests brought for its
        time; one without a cycle had its one token."""
        table = self.costs.table
        time_taken = plain_steps(
            table, rows, verified, ran.drafted, proposes=self.costs.steps > 0, beside=beside
        )
        self.rate.observe(rows + drafted, rows, time_taken)
        if self.pause is not None and self.costs.steps:  # else a table has no unit of time yet
            gain_us = gain_of(table, rows, drafted, verified, ran.drafted, beside=beside)
            self.pause.observe(ran.exposed_us, gain_us, rows, table.time(rows))

    def choose(
        self,
        names: Sequence[str],
        most: int | None = None,
        unread: Collection[str] = (),
        *,
        others: int = 0,
        beside: int = 0,
    ) -> Decisions:
        """The next draft of each request.

        A request that is unknown, has ended, or switched speculation off verifies nothing.

        Args:
            most: draft tokens that the step has room for, of all requests together.
            unread: requests that the model drafter cannot draft for.
            others: requests of the step beside ``names``, which verify nothing.
            beside: tokens of prompts that the step is expected to read.

        Raises:
            Exception: whatever went wrong for the champion; a side for which anything does plays no
                more, and leaves the step to the champion.
        """
        began = self.underway.begin()
        champion = self.policy
        side = self.interleaver.next_variant(champion) if self.interleaver is not None else None
        try:
            return self._choose(began, side, champion, names, most, unread, others, beside)
        except Exception:
            if side is None or self.interleaver is None or side.name == CHAMPION:
                raise
            # What it did to this step it would do to the next: its block would never end.
            self._limited_log.exception(f"variant {side.name!r} is disabled: it could not choose")
            self.interleaver.disable(side)
        return self._choose(began, None, champion, names, most, unread, others, beside)

    def _choose(
        self,
        began: float,
        side: Variant | None,
        champion: Policy,
        names: Sequence[str],
        most: int | None,
        unread: Collection[str],
        others: int,
        beside: int,
    ) -> Decisions:
        cache, table = self.cache, self.table
        shown = side.draft_source if side is not None else "worker"
        awake = self.pause is None or self.pause.awake
        if awake and cache is not None:
            cache.index()
        table.reserve(len(names))
        slots = table.of(names)
        limits = STOCK
        if cache is not None and shown != "stock":
            limits = Limits(cache.depth, cache.most, cache.limits)
        places, rooms, owners, features, tokens, keys = proposing.propose(
            *self._handles(), slots, self._longest,
            cache is not None and (shown == "stock" or (awake and shown != "none")),
            limits.depth, limits.most, limits.of_draft, self._classes,
        )  # fmt: skip
        described = time.perf_counter()
        unable = NOBODY  # to have a model draft
        if unread:
            unable = np.flatnonzero([names[place] in unread for place in places.tolist()])
        batch = len(names) + others
        policy = side.policy if side is not None else champion
        serves = side is None or side.name == CHAMPION
        rule = self._choice if shown == "worker" else choose
        wanted = rule(
            policy, features, owners, len(places), batch, self.costs.table, self.rate.value,
            self._model_len, odds=self.model_arm.odds, most=most, unread=unable,
            beside=beside,
        )  # fmt: skip
        self.worth_us = wanted.worth if serves and awake else None
        arms = wanted.arms
        if not len(arms) == len(wanted.lengths) == len(wanted.expected) == len(places):
            raise ValueError(f"a choice for {len(arms)} requests, asked for {len(places)}")
        if shown == "worker":
            arms = self._guarded(arms, serves, slots[places], owners, unable)
        underway = self.underway
        underway.side, underway.began, underway.asked = side, began, len(names)
        underway.unpaid_us = (time.perf_counter() - described) * 1e6 if shown == "stock" else 0.0
        self.counters.asleep += not awake and shown == "worker"
        self.counters.probes = self._probing.taken
        draft_us = (time.perf_counter() - began) * 1e6
        floor = self.floor if serves else None
        decided = np.zeros((len(names), 4), np.int32)
        cycles.begin(
            table.handle, slots, places, rooms, owners, features, tokens, keys, arms,
            wanted.arms, wanted.lengths, wanted.expected, wanted.model, wanted.model_len,
            MAX_TOKENS if most is None else most,
            floor is not None and floor.in_force != "policy", batch, beside,
            self.rate.value, self.costs.table.dense, serves,
            self._sink.step(
                policy, side.name if side is not None else "",
                self.rate.value if policy.kind == "survival" else policy.threshold, time.time(),
                batch, draft_us,
            ),
            decided,
        )  # fmt: skip
        underway.drafted = wanted.model_len if MODEL in arms.tobytes() else 0
        self.counters.choose_us.append(draft_us)
        underway.settled_us = 0.0
        now = underway.spent(began)
        underway.decided = now if len(names) else 0.0  # what follows nobody's step is a pause
        return Decisions(decided, tokens)

    def _guarded(
        self,
        arms: Arms,
        serves: bool,
        slots: NDArray[np.int64],
        owners: NDArray[np.int64],
        unable: NDArray[np.int64],
    ) -> Arms:
        """The arms [n] that are taken; the floor judges the champion, and nobody on trial."""
        if self.floor is None or not len(arms):
            return arms
        if serves:
            arms = relieved(arms, self.floor, owners, unable)

        def behind() -> NDArray[np.int64]:
            theirs: NDArray[np.int64] = self.table.arrays.requests[slots]
            return theirs[:, LENGTH] - theirs[:, DRAFTED_AT]

        arms = self._probing.at_the_drafter(arms, behind, unable)
        return self._probing.at_nothing(arms, self.costs, self._last)

    def drafted(self, names: Sequence[str], lengths: Sequence[int], k: int) -> None:
        """Take in what the engine made of the last choice.

        Args:
            lengths: draft tokens that each of ``names`` really has.
            k: tokens for which the model drafter really ran; 0 if it did not.
        """
        self.underway.drafted = k
        cycles.drafted(self.table.handle, self.table.of(names), np.array(lengths, np.int64))

    def settle(self, exposed: bool = True) -> None:
        """What the next choice does not need: accounts of the floor, and events.

        For an engine to call while the target runs; :meth:`observe` does what is left.

        Args:
            exposed: whether the engine waits for it, as on a CPU, where the target has run by then.
        """
        began = time.perf_counter()
        self._settle()
        self.underway.settled(began, exposed)

    def _settle(self) -> None:
        if not self.table.arrays.counts[UNSETTLED]:
            self.table.settled()
            return
        sink, floor, costs = self._sink, self.floor or NO_FLOOR, self.costs.table
        sink.control[HEAD] = cycles.settle(
            self.table.handle, floor.needed, floor.ahead, floor.state, self.floor is not None,
            costs.dense, costs.prices, sink.raw,
            sink.control, int(sink.control[SETTLED]), sink.words,
        )  # fmt: skip
        self.table.settled()
        sink.written()

    def stop(self, name: str, reason: str) -> None:
        """Stop following a request: its open labels leave censored.

        Unknown names are ignored; never raises.
        """
        super().stop(name, reason)
        if not self.table.slots:
            self.underway.decided = 0.0  # nobody waits for the step any more: a pause begins

    def close(self) -> None:
        """Stop every request: the worker is going down."""
        for name in list(self.table.slots):
            self.stop(name, "abort")
        self._settle()


NOBODY: Final = np.zeros(0, np.int64)
NO_FLOOR: Final = Floor(has_model=False)
