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

from decoder.complaints import Complaints
from decoder.contracts.bundle import CHAMPION, FIRST, MAX_DRAFT, Policy
from decoder.contracts.features import FloatArray
from decoder.core.choice import Chosen, choose
from decoder.core.costs import LiveCosts
from decoder.core.counters import Counters
from decoder.core.doze import Doze
from decoder.core.floor import Floor
from decoder.core.followed import Followed, Taken
from decoder.core.hindsight import EventSink, weigh
from decoder.core.looks import Looks
from decoder.core.payoff.featurize import featurize
from decoder.core.payoff.model_arm import START, ModelArm
from decoder.core.rate import LiveRate
from decoder.core.requests import Committed, Decision, RequestOptions, Step, state_of
from decoder.core.underway import Underway
from decoder.drafting.drafts import Tokens
from decoder.drafting.suffix import SuffixCache
from decoder.policy.pricing import MAX_TOKENS, gain_of, plain_steps
from decoder.policy.rule import MODEL
from decoder.trial.sides import Side
from decoder.trial.turns import Turns

__all__ = ["Committed", "Counters", "Decision", "DraftRouter", "EventSink", "RequestOptions"]


class DraftRouter:
    """Chooses drafts for the requests of one worker and labels every cache draft it saw.

    ``policy`` may be replaced by another thread at any time: it is read once a step, so a step
    never mixes two policies and a swap waits for nothing. ``turns``, where there are any, say
    which steps another side decides.
    """

    def __init__(
        self,
        cache: SuffixCache,
        policy: Policy,
        token_classes: NDArray[np.float32],
        sink: EventSink,
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
        self.counters = Counters()
        self.costs = costs or LiveCosts(live=False)
        self.floor = floor
        self.rate = LiveRate()
        self.cache = cache
        self._classes = token_classes
        self._sink, self._choice = sink, choice
        self._complaints = Complaints()
        self._model_len = min(model_draft_tokens, longest) if has_model else 0
        self._shorter = shorter
        # A first policy was made with drafters of its own: it knows nothing of this one.
        known = policy.model_payoff if policy.role != FIRST else 0.0
        self.model_arm = ModelArm(known or START, self._model_len)
        self.doze = Doze() if floor is not None else None
        self.followed = Followed(
            cache, self.model_arm, self._model_len, longest, self.counters, self._complaints
        )
        self._looks = Looks(floor, self.model_arm, self._model_len > 0)
        self._events = 0
        self.underway = Underway()
        self._last = 1, 0  # tokens that the last step ran through the target, and drafted
        self.worth_us: float | None = None
        """Time that model drafts would be worth in the last choice, had all requests been read by
        the drafter; None where the champion did not decide it."""

    def __contains__(self, request: str) -> bool:
        return request in self.followed.requests

    def start(
        self, request: str, prompt: Tokens, options: RequestOptions, output: Sequence[int] = ()
    ) -> None:
        """Begin to follow a request whose prompt is int32 [n].

        Args:
            output: tokens committed before, of a request that is met late.

        Raises:
            ValueError: the request is followed already.
        """
        self.followed.start(request, prompt, options, output)

    def observe(self, outcomes: Sequence[Committed], step_tokens: int, usual: bool = True) -> None:
        """Take in what the last step committed; labels resolve.

        Args:
            outcomes: one entry for each request the step advanced.
            step_tokens: tokens the step ran through the target, prefill included; 0 for tokens
                that no step made, of which nothing is learned about time.
            usual: False where the step also did work that had waited: it says nothing of costs.
        """
        began = self.underway.since or time.perf_counter()
        # A choice stands for the step that follows it, and for no later one.
        ran, self.underway = self.underway, Underway(since=self.underway.since)
        serves = ran.side is None or ran.side.name == CHAMPION
        step_us = ran.ran_us(began)
        if ran.decided:
            if serves and (self.doze is None or self.doze.awake):
                self.costs.proposed(ran.asked, ran.exposed_us)
            self.counters.own_us.append(ran.own_us)
            self.counters.exposed_us.append(ran.exposed_us)
        self._settle()
        self._last = max(step_tokens, 1), ran.drafted
        decoding_alone = step_tokens == sum(1 + o.verified_len for o in outcomes)
        if usual and decoding_alone and ran.decided:
            self.costs.observe(step_tokens, len(outcomes), ran.drafted, step_us)
        taken = self.followed.take(outcomes, step_tokens, step_us, ran.side is not None)
        if serves and taken.cycles and step_tokens:
            verified = sum(1 + o.verified_len for o in outcomes)
            self._reckon(taken, ran, len(outcomes), max(step_tokens - verified, 0))
        now = self.underway.spent(began)
        if ran.decided and outcomes and self.turns is not None and self.turns.dealing:
            table = self.costs.table
            self.turns.book(
                ran.side,
                ran.came_to(table, outcomes, taken.tokens, taken.groups, step_us, now, usual),
                decoding_alone,
            )

    def _reckon(self, taken: Taken, ran: Underway, rows: int, beside: int) -> None:
        """Let rate and doze know what the champion's step of ``rows`` requests brought for its
        time; one without a cycle had its one token."""
        table, drafted = self.costs.table, taken.decoded - taken.cycles
        time_taken = plain_steps(
            table, rows, taken.verified, ran.drafted, proposes=self.costs.steps > 0, beside=beside
        )
        self.rate.observe(rows + drafted, rows, time_taken)
        if self.doze is not None and self.costs.steps:  # else a table has no unit of time yet
            gain_us = gain_of(table, rows, drafted, taken.verified, ran.drafted, beside=beside)
            self.doze.observe(ran.exposed_us, gain_us, rows, table.time(rows))

    def choose(
        self,
        names: Sequence[str],
        most: int | None = None,
        unread: Collection[str] = (),
        *,
        others: int = 0,
        beside: int = 0,
    ) -> list[Decision]:
        """The next draft of each request; one featurize and one estimate for all of them.

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
    ) -> list[Decision]:
        shown = side.shown if side is not None else "worker"
        awake = self.doze is None or self.doze.awake
        self.counters.asleep += not awake and shown == "worker"
        if awake:
            self.cache.index()
        proposed = self.followed.propose(names, shown if awake or shown == "stock" else "none")
        requests, drafts, _ = proposed
        owners = [row for row, draft in enumerate(drafts) if draft is not None]
        described = time.perf_counter()
        states = [state_of(requests[row], draft) for row, draft in enumerate(drafts) if draft]
        features = featurize(states, self._classes)
        unable = [row for row, r in enumerate(requests) if r.name in unread] if unread else []
        batch = len(names) + others
        side, wanted = self._wanted(
            side, champion, features, owners, len(requests), batch, most, unable, beside
        )
        policy = side.policy if side is not None else champion
        serves = side is None or side.name == CHAMPION
        self.worth_us = wanted.worth if serves and awake else None
        arms = wanted.arms
        if shown == "worker":
            arms = self._looks.arms(
                arms, [d is not None for d in drafts],
                [r.length - r.drafted_at for r in requests], self.costs, self._last,
                relieved=serves, unable=unable,
            )  # fmt: skip
        underway = self.underway
        underway.side, underway.began, underway.asked = side, began, len(names)
        underway.unpaid_us = (time.perf_counter() - described) * 1e6 if shown == "stock" else 0.0
        self.counters.probes = self._looks.taken
        draft_us = (time.perf_counter() - began) * 1e6
        step = Step(
            int(wanted.lengths.sum()), sum(len(s.draft.tokens) for s in states),
            int((wanted.arms == MODEL).sum()), batch, time.time(),
            self.rate.value if policy.kind == "survival" else policy.threshold, wanted.model_len,
            arms.tolist(), wanted.arms.tolist(), wanted.lengths.tolist(), wanted.expected,
            wanted.model, features, draft_us, policy=policy,
            side=side.name if side is not None else "", beside=beside,
        )  # fmt: skip
        underway.drafted = step.model_len if MODEL in step.arms else 0
        floor = self.floor if step.serves else None
        decisions = self.followed.begin(
            step, proposed, states, MAX_TOKENS if most is None else most,
            whole=floor is not None and floor.in_force != "policy",
        )  # fmt: skip
        self.counters.choose_us.append(draft_us)
        underway.settled_us = 0.0
        now = underway.spent(began)
        underway.decided = now if names else 0.0  # what follows nobody's step is a pause
        if len(decisions) == len(names):
            return decisions
        found = {r.name: d for r, d in zip(requests, decisions, strict=True)}
        return [found.get(name, _NOTHING) for name in names]

    def _wanted(
        self,
        side: Side | None,
        champion: Policy,
        features: FloatArray,
        owners: Sequence[int],
        n: int,
        rows: int,
        most: int | None,
        unable: Sequence[int],
        beside: int,
    ) -> tuple[Side | None, Chosen]:
        """Who decides, and what; a side that cannot leaves it to the champion."""
        rule = self._choice if side is None or side.shown == "worker" else choose
        try:
            return side, rule(
                champion if side is None else side.policy, features, np.array(owners, np.int64),
                n, rows, self.costs.table, self.rate.value, self._model_len,
                odds=self.model_arm.odds, shorter=self._shorter, most=most,
                unread=np.array(unable, np.int64), beside=beside,
            )  # fmt: skip
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
        self.followed.drafted(names, lengths)

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
        unsettled, self.followed.unsettled = self.followed.unsettled, []
        for request, label, censored in unsettled:
            try:
                weigh(self.floor, self.costs.table, request, label)
            except Exception:  # noqa: BLE001 - told by the complaints
                self._complaints.exception("the floor could not weigh a cycle")
            self._sink.put((self._events, request.name, request.options, label, censored))
            self._events += 1
            self.counters.labelled += label.subject.draft_len > 0

    def stop(self, name: str, reason: str) -> None:
        """Stop following a request: its open labels leave censored.

        Unknown names are ignored; never raises.
        """
        if self.followed.stop(name, reason) and not self.followed.requests:
            self.underway.decided = 0.0  # nobody waits for the step any more: a pause begins

    def close(self) -> None:
        """Stop every request: the worker is going down."""
        for name in list(self.followed.requests):
            self.stop(name, "abort")
        self._settle()


_NOTHING: Final = Decision("none")
