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
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Handle
from decoder.complaints import Complaints
from decoder.contracts.bundle import CHAMPION, FIRST, MAX_DRAFT, Policy
from decoder.contracts.features import FloatArray
from decoder.core import cycles, proposing, taking
from decoder.core.choice import Chosen, choose
from decoder.core.costs import LiveCosts
from decoder.core.counters import Counters
from decoder.core.events import Sink
from decoder.core.guards.floor import Floor
from decoder.core.guards.pause import SpeculationPause
from decoder.core.guards.probing import Probing, relieved
from decoder.core.payoff.memory import Memories
from decoder.core.payoff.model_arm import START, ModelArm
from decoder.core.rate import LiveRate
from decoder.core.requests import Committed, Decision, Decisions, Outcomes, RequestOptions
from decoder.core.table import (
    DRAFTED_AT,
    ENDED,
    INDEX,
    LENGTH,
    MEMORY,
    OPEN,
    STOPPED,
    UNSETTLED,
    RequestTable,
)
from decoder.core.underway import Underway
from decoder.drafting.drafts import STOCK, Limits, Tokens
from decoder.drafting.pages import new_pool
from decoder.drafting.suffix import SuffixCache
from decoder.policy.pricing import MAX_TOKENS, gain_of, plain_steps
from decoder.policy.rule import MODEL, Arms
from decoder.telemetry.ring import HEAD, SETTLED
from decoder.trial.sides import Side
from decoder.trial.turns import Turns

__all__ = ["Committed", "Counters", "Decision", "DraftRouter", "RequestOptions", "Sink"]


class DraftRouter:
    """Chooses drafts for the requests of one worker and labels every cache draft it saw.

    ``policy`` may be replaced by another thread at any time: it is read once a step, so a step
    never mixes two policies and a swap waits for nothing. ``turns``, where there are any, say
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
        shorter: bool = True,
        costs: LiveCosts | None = None,
        floor: Floor | None = None,
        turns: Turns | None = None,
        choice: Callable[..., Chosen] = choose,
    ) -> None:
        """Put a router together.

        Args:
            cache: None proposes no cache drafts.
            model_draft_tokens: tokens of a model draft at most, where the engine ``has_model``.
            longest: tokens of any draft at most: what the engine was started for.
            shorter: whether a survival policy may ask for fewer, as it does where that pays.
            costs: the live table; None for nominal costs that never change.
            floor: None lets the policy have its way whatever it costs, looks at nothing, and never
                sleeps.
            turns: of the sides that are compared; None compares none.
            choice: a rival's rule in the place of :func:`decoder.core.choice.choose`.
        """
        self.policy = policy
        self.turns = turns
        self.costs = costs or LiveCosts(live=False)
        self.floor = floor
        self.rate = LiveRate()
        self.cache = cache
        self._classes = np.ascontiguousarray(token_classes, np.float32)
        self._sink, self._choice = sink, choice
        self._complaints = Complaints()
        self._model_len = min(model_draft_tokens, longest) if has_model else 0
        self._shorter = shorter
        # A first policy was made with drafters of its own: it knows nothing of this one.
        known = policy.model_payoff if policy.role != FIRST else 0.0
        self.model_arm = ModelArm(known or START, self._model_len)
        self.pause = SpeculationPause() if floor is not None else None
        most = max(cache.most if cache is not None else 1, STOCK.most)
        self.table = RequestTable(most)
        self.counters = Counters(self.table.arrays.counts)
        self.memories = Memories(cache.memory_bytes if cache is not None else 0)
        self._text, self._paid = Handle(), Handle()
        self._probing = Probing(self.model_arm, self._model_len > 0)
        self._longest = longest
        self.underway = Underway()
        self._last = 1, 0  # tokens that the last step ran through the target, and drafted
        self.worth_us: float | None = None
        """Time that model drafts would be worth in the last choice, had all requests been read by
        the drafter; None where the champion did not decide it."""

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
        if request in self.table:
            raise ValueError(f"request {request!r} is active already")
        text = np.concatenate([prompt, np.array(output, np.int32)], dtype=np.int32)
        payoff = self.model_arm.payoff(self._model_len) if self._model_len else 1.0
        slot = self.table.add(
            request, options, text, len(prompt), payoff, self._sink.names(request, options)
        )
        self.counters.started += 1
        row = self.table.arrays.requests[slot]
        row[MEMORY] = self.memories.begin(options.key)
        if self.cache is None:
            return
        # As one text: what a request wrote before it was met is not written for others again. One
        # that may have no draft has nothing to copy from it.
        left = min(options.max_tokens - len(output), options.max_model_len - len(text)) - 1
        kept = text if options.speculate and left > 0 else text[:0]
        try:
            row[INDEX] = self.cache.start(request, kept, options.key)
        except Exception:
            self.stop(request, "lost")
            raise

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
            outcomes = self._in_columns(outcomes)
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
        groups = self._groups(slots) if ran.side is not None else {}
        sessions = self._sessions(outcomes.names, slots) if ran.side is not None else frozenset()
        made, sums = self._take(outcomes, slots.copy(), step_tokens, step_us)
        closed, brought, closed_verified, verified = sums
        decoding_alone = step_tokens == rows + verified
        if usual and decoding_alone and ran.decided:
            self.costs.observe(step_tokens, rows, ran.drafted, step_us)
        if serves and closed and step_tokens:
            beside = max(step_tokens - rows - verified, 0)
            self._reckon(brought - closed, closed_verified, ran, rows, beside)
        now = self.underway.spent(began)
        if ran.decided and rows and self.turns is not None and self.turns.dealing:
            told = {name: [int(made[at].sum()), len(at)] for name, at in groups.items()}
            self.turns.book(
                ran.side,
                ran.came_to(
                    self.costs.table, outcomes.names, verified, self.counters.tokens - known, told,
                    step_us, now, usual,
                )._replace(sessions=sessions),
                decoding_alone,
            )  # fmt: skip

    def _in_columns(self, outcomes: Sequence[Committed]) -> Outcomes:
        """The same; a request whose tokens are none is left out."""
        try:
            return Outcomes.of(outcomes)
        except (OverflowError, TypeError, ValueError):
            sound = list[Committed]()
            for outcome in outcomes:
                try:
                    Outcomes.of([outcome])
                    sound.append(outcome)
                except (OverflowError, TypeError, ValueError):
                    self._fault(outcome.request)
            return Outcomes.of(sound)

    def _groups(self, slots: NDArray[np.int64]) -> dict[tuple[str, str], list[int]]:
        """Which of the requests are of each tenant and workload."""
        groups: dict[tuple[str, str], list[int]] = {}
        for at, slot in enumerate(slots.tolist()):
            if slot >= 0:
                options = self.table.options[slot]
                groups.setdefault((options.tenant, options.workload), []).append(at)
        return groups

    def _sessions(self, names: Sequence[str], slots: NDArray[np.int64]) -> frozenset[str]:
        held = zip(names, slots.tolist(), strict=True)
        return frozenset(self.table.options[s].session or name for name, s in held if s >= 0)

    def _take(
        self,
        outcomes: Outcomes,
        slots: NDArray[np.int64],
        step_tokens: int,
        step_us: float,
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Take in what a step committed: tokens [n] of each, and the sums of :func:`taking.take`.
        Mutates ``slots``."""
        names, tokens, ends, verified, lengths = outcomes
        done, made = np.zeros((2, len(names)), np.int64)
        sums = np.zeros(taking.BEGAN + 1, np.int64)
        at, why = 0, -1
        while why != taking.DONE:
            table = self.table.arrays
            at, why = taking.take(
                *self._handles(), self.model_arm.odds, self.model_arm.seen,
                slots, tokens, ends, verified, lengths, step_tokens, step_us, at, done, made, sums,
            )  # fmt: skip
            if why == taking.DONE:
                break
            place = at - (why == taking.OVER)
            name, slot = names[place], int(slots[place])
            if why == taking.OVER:
                if self.cache is not None:
                    self.cache.book(name)
                stopped = int(table.requests[slot, ENDED]) == STOPPED
                self.stop(name, "stop" if stopped else "length")
            elif why == taking.LOST:
                slots[place] = -1
                self._leave_out(name, "length")
            elif why == taking.GROW:
                done[place] |= taking.GROWN
                row = table.requests[slot]
                self.memories.grow(int(row[MEMORY]), int(row[OPEN]))
            else:
                done[place] |= taking.WRITTEN
                came = tokens[(ends[place - 1] if place else 0) : ends[place]]
                count, _ = taking.until_end(table, slot, came)
                try:
                    assert self.cache is not None
                    self.cache.extend(name, came[:count].tolist())
                except Exception:  # noqa: BLE001 - told by the complaints
                    slots[place] = -1
                    self._fault(name)
        if sums[taking.BEGAN] and self.cache is not None:
            for place in np.flatnonzero(done & taking.BEGUN).tolist():
                self.cache.book(names[place])
        return made, sums[: taking.BEGAN].tolist()

    def _handles(self) -> tuple[Any, Any, Any]:
        """Of the requests, the text and the memories."""
        pool = self.cache.pool if self.cache is not None else NO_TEXT
        return self.table.handle, self._text.of(pool), self._paid.of(self.memories.payoffs)

    def _fault(self, name: str) -> None:
        """Count and log the exception being handled, of the bookkeeping of a request."""
        if name in self.table:
            self._complaints.exception("a request is left out of drafting: its bookkeeping failed")
            self._leave_out(name, "fault")

    def _leave_out(self, name: str, reason: str) -> None:
        """Follow a request no longer: what is known of it cannot be relied on."""
        self.counters.left_out[reason] += 1
        self.stop(name, "lost")

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
            Exception: whatever went wrong; a side whose turn it was plays no more.
        """
        began = self.underway.begin()
        champion = self.policy
        side = self.turns.next(champion) if self.turns is not None else None
        try:
            return self._choose(began, champion, side, names, most, unread, others, beside)
        except Exception:
            # its block would never end: what it did to this step it would do to the next
            if side is not None and side.name != CHAMPION:
                turns = self.turns
                if turns is not None and turns.playing == side.name:
                    turns.fail(side)
            raise

    def _choose(
        self,
        began: float,
        champion: Policy,
        side: Side | None,
        names: Sequence[str],
        most: int | None,
        unread: Collection[str],
        others: int,
        beside: int,
    ) -> Decisions:
        cache, table = self.cache, self.table
        shown = side.shown if side is not None else "worker"
        awake = self.pause is None or self.pause.awake
        self.counters.asleep += not awake and shown == "worker"
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
        side, wanted = self._wanted(
            side, champion, features, owners, len(places), batch, most, unable, beside
        )
        policy = side.policy if side is not None else champion
        serves = side is None or side.name == CHAMPION
        self.worth_us = wanted.worth if serves and awake else None
        arms = wanted.arms
        if not len(arms) == len(wanted.lengths) == len(wanted.expected) == len(places):
            raise ValueError(f"a choice for {len(arms)} requests, asked for {len(places)}")
        if shown == "worker":
            arms = self._guarded(arms, serves, slots[places], owners, unable)
        underway = self.underway
        underway.side, underway.began, underway.asked = side, began, len(names)
        underway.unpaid_us = (time.perf_counter() - described) * 1e6 if shown == "stock" else 0.0
        self.counters.probes = self._probing.taken
        draft_us = (time.perf_counter() - began) * 1e6
        floor = self.floor if serves else None
        decided = np.zeros((len(names), 4), np.int32)
        cycles.begin(
            table.handle, slots, places, rooms, owners, features, tokens, keys, arms,
            wanted.arms, wanted.lengths, wanted.expected, wanted.model, wanted.model_len,
            MAX_TOKENS if most is None else most,
            floor is not None and floor.in_force != "policy", beside, serves,
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

    def _wanted(
        self,
        side: Side | None,
        champion: Policy,
        features: FloatArray,
        owners: NDArray[np.int64],
        n: int,
        rows: int,
        most: int | None,
        unable: NDArray[np.int64],
        beside: int,
    ) -> tuple[Side | None, Chosen]:
        """Who decides, and what; a side that cannot leaves it to the champion."""
        rule = self._choice if side is None or side.shown == "worker" else choose
        try:
            chosen = rule(
                champion if side is None else side.policy, features, owners,
                n, rows, self.costs.table, self.rate.value, self._model_len,
                odds=self.model_arm.odds, shorter=self._shorter, most=most,
                unread=unable, beside=beside,
            )  # fmt: skip
            return side, chosen if rule is choose else chosen.typed()
        except Exception:
            if side is None or self.turns is None or side.name == CHAMPION:
                raise
            self._complaints.exception(f"the side {side.name!r} plays no more: it could not choose")
            self.turns.fail(side)
        return self._wanted(None, champion, features, owners, n, rows, most, unable, beside)

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
        if name not in self.table:
            return
        slot = self.table.remove(name)
        self.counters.stopped += 1
        if not self.table.slots:
            self.underway.decided = 0.0  # nobody waits for the step any more: a pause begins
        try:
            cycles.close(self.table.arrays, slot, self._sink.word(reason))
            if self.cache is not None:
                self.cache.stop(name)
            self.memories.end(int(self.table.arrays.requests[slot, MEMORY]))
        except Exception:  # noqa: BLE001 - told by the complaints
            self._complaints.exception("a request's last labels are lost: its bookkeeping failed")
            self.counters.left_out["fault"] += 1

    def close(self) -> None:
        """Stop every request: the worker is going down."""
        for name in list(self.table.slots):
            self.stop(name, "abort")
        self._settle()


NOBODY: Final = np.zeros(0, np.int64)
NO_TEXT: Final = new_pool(1, 1, 1)
NO_FLOOR: Final = Floor(has_model=False)
