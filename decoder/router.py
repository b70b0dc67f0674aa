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
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.choice import Chosen, choose
from decoder.complaints import Complaints
from decoder.contracts.bundle import CHAMPION, FIRST, MAX_DRAFT, Policy
from decoder.contracts.features import FloatArray
from decoder.costs import LiveCosts
from decoder.counters import Counters
from decoder.doze import Doze
from decoder.drafting.suffix import STEP_TOKENS, STOCK, CacheDraft, SuffixCache, Tokens
from decoder.floor import Floor
from decoder.hindsight import Resolved, outcomes_of
from decoder.labels import Label
from decoder.looks import Looks
from decoder.payoff.featurize import DraftState, featurize
from decoder.payoff.memory import History, TenantMemories
from decoder.payoff.model_arm import START, ModelArm
from decoder.policy.pricing import MAX_TOKENS, gain_of, plain_steps, step_time
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE
from decoder.rate import LiveRate
from decoder.requests import Committed, Cycle, Decision, Request, RequestOptions, Step, state_of
from decoder.trial.block import Groups, Made
from decoder.trial.sides import Shown, Side
from decoder.trial.turns import Turns

__all__ = ["Committed", "Counters", "Decision", "DraftRouter", "EventSink", "RequestOptions"]


class EventSink(Protocol):
    """Where finished events go. ``put`` never blocks and never raises."""

    def put(self, resolved: Resolved) -> None:
        """Take one event to be."""


INITIAL_ROOM: Final = 1024
"""Tokens of growth reserved at start, so that most requests never copy their prefix."""


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
            choice: a rival's rule in the place of :func:`decoder.choice.choose`.
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
        self._longest = longest
        self._model_len = min(model_draft_tokens, longest) if has_model else 0
        self._shorter = shorter
        # A first policy was made with drafters of its own: it knows nothing of this one.
        known = policy.model_payoff if policy.role != FIRST else 0.0
        self.model_arm = ModelArm(known or START, self._model_len)
        self.doze = Doze() if floor is not None else None
        self._looks = Looks(floor, self.model_arm, self._model_len > 0)
        self._events = 0
        self._requests: dict[str, Request] = {}
        self._memories = TenantMemories(cache.memory_bytes)
        self._side: Side | None = None  # that decided the step under way, if it was dealt out
        self._began = self._decided = 0.0  # its choice, seconds of the performance counter
        self._unpaid_us = 0.0  # of that choice, what its side's like would not do
        self._settled_us = 0.0  # of the time since then
        self._own_us = self._exposed_us = 0.0  # of this step, as in :class:`Counters`
        self._unsettled: list[tuple[Request, Label[Cycle], str]] = []
        self._drafted = 0  # tokens that the model drafter makes in the step under way
        self._asked = 0  # requests of the last choice
        self._last = 1, 0  # tokens that the last step ran through the target, and drafted

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def start(
        self, request: str, prompt: Tokens, options: RequestOptions, output: Sequence[int] = ()
    ) -> None:
        """Begin to follow a request whose prompt is int32 [n].

        Args:
            output: tokens committed before, of a request that is met late.

        Raises:
            ValueError: the request is followed already.
        """
        prompt = np.ascontiguousarray(prompt, dtype=np.int32)
        # As one text: what a request wrote before it was met is not written for others again.
        text = np.concatenate([prompt, np.asarray(output, np.int32)]) if len(output) else prompt
        self.cache.start(request, text, options.key)
        grown = np.empty(len(prompt) + len(output) + INITIAL_ROOM, np.int32)
        grown[: len(prompt)] = prompt
        started = Request(
            request, options, grown, len(prompt), len(prompt), self._memories.of(options.key),
            tuple(prompt[-2:].tolist()),
            History(model=self.model_arm.payoff(self._model_len)) if self._model_len else History(),
        )  # fmt: skip
        self._requests[request] = started
        self.counters.started += 1
        if len(output):
            started.append(output)

    def observe(self, outcomes: Sequence[Committed], step_tokens: int, usual: bool = True) -> None:
        """Take in what the last step committed; labels resolve.

        Args:
            outcomes: one entry for each request the step advanced.
            step_tokens: tokens the step ran through the target, prefill included; 0 for tokens
                that no step made, of which nothing is learned about time.
            usual: False where the step also did work that had waited: it says nothing of costs.
        """
        began = time.perf_counter()
        # A choice stands for the step that follows it, and for no later one.
        decided, self._decided = self._decided, 0.0
        side, self._side = self._side, None
        serves = side is None or side.name == CHAMPION
        step_us = (began - decided) * 1e6 - self._settled_us if decided else 0.0
        exposed_us = self._exposed_us
        if decided:
            if serves and (self.doze is None or self.doze.awake):
                self.costs.proposed(self._asked, exposed_us)
            self.counters.own_us.append(self._own_us)
            self.counters.exposed_us.append(exposed_us)
        self._own_us = self._exposed_us = 0.0
        self._settle()
        self._last = max(step_tokens, 1), self._drafted
        decoding_alone = step_tokens == sum(1 + o.verified_len for o in outcomes)
        if usual and decoding_alone and decided:
            self.costs.observe(step_tokens, len(outcomes), self._drafted, step_us)
        decoded, verified, cycles, before = 0, 0, 0, self.counters.tokens
        groups: Groups = {}
        for outcome in outcomes:
            request = self._requests.get(outcome.request)
            if request is None or request.ended:
                continue
            known = self.counters.tokens
            try:
                made = self._take(request, outcome, step_tokens, step_us)
            except Exception:  # noqa: BLE001 - told by the complaints
                self._complaints.exception(
                    "a request is left out of drafting: its bookkeeping failed"
                )
                self._leave_out(request, "fault")
                continue
            if side is not None:
                group = groups.setdefault(
                    (request.options.tenant, request.options.workload), [0, 0]
                )
                group[0] += self.counters.tokens - known
                group[1] += 1
            if made is not None:
                decoded, cycles = decoded + made, cycles + 1
                verified += outcome.verified_len
        if serves and cycles and step_tokens:
            table = self.costs.table
            # Prompts that shared the step are left out: they cost the same whatever was chosen.
            time_taken = plain_steps(
                table, cycles, verified, self._drafted, proposes=self.costs.steps > 0
            )
            self.rate.observe(decoded, cycles, time_taken)
            if self.doze is not None and self.costs.steps:  # else a table has no unit of time yet
                gain_us = gain_of(table, cycles, decoded - cycles, verified, self._drafted)
                self.doze.observe(exposed_us, gain_us, cycles, table.time(cycles))
        now = self._spent(began)
        if decided and outcomes and self.turns is not None and self.turns.dealing:
            tokens = self.counters.tokens - before
            whole_us = (now - self._began) * 1e6
            came_to = self._came_to(side, outcomes, tokens, step_us, whole_us, usual, groups)
            self.turns.book(side, came_to, decoding_alone)

    def _take(
        self, request: Request, outcome: Committed, step_tokens: int, step_us: float
    ) -> int | None:
        """Take in one request's outcome; tokens committed if they close a cycle."""
        committed = request.until_end(outcome.tokens)
        cycle, request.cycle = request.cycle, None
        self.counters.tokens += len(committed)
        request.append(committed)
        if outcome.length and not request.ended and request.length != outcome.length:
            self._leave_out(request, "length")
            return None
        if cycle is not None:
            cycle.verified_len = outcome.verified_len
            cycle.step.tokens, cycle.step.us = step_tokens, step_us
            cycle.committed = len(committed)
            self._count(request, cycle, len(outcome.tokens))
            if not cycle.draft_len:
                self._unsettled.append((request, Label(cycle, 0, censored=False), ""))
        self.cache.extend(request.name, committed)
        for label in request.labels.commit(committed):
            self._resolve(request, label, censored="")
        if request.ended:
            self.stop(request.name, request.ended)
        return None if cycle is None else len(committed)

    def _came_to(
        self,
        side: Side | None,
        outcomes: Sequence[Committed],
        tokens: int,
        step_us: float,
        whole_us: float,
        usual: bool,
        groups: Groups,
    ) -> Made:
        """What a step came to. ``whole_us`` has the router's own work in it, ``step_us`` has not:
        a side that is shown no draft pays for none of it."""
        table, rows = self.costs.table, len(outcomes)
        drafts = sum(outcome.verified_len for outcome in outcomes)
        cost_us = step_time(table, rows, drafts, self._last[1])
        late_us = 0.0 if usual else max(step_us - cost_us, 0.0)
        us = step_us
        if side is None or side.shown != "none":
            us = whole_us - self._unpaid_us
            cost_us += table.proposing(rows)
        names = tuple(outcome.request for outcome in outcomes)
        return Made(tokens, names, us, cost_us, late_us, groups)

    def choose(self, names: Sequence[str], most: int | None = None) -> list[Decision]:
        """The next draft of each request; one featurize and one estimate for all of them.

        A request that is unknown, has ended, or switched speculation off verifies nothing.

        Args:
            most: draft tokens that the step has room for, of all requests together.

        Raises:
            Exception: whatever went wrong; a side whose turn it was plays no more.
        """
        began = time.perf_counter()
        champion = self.policy
        side = self.turns.next(champion) if self.turns is not None else None
        try:
            return self._choose(began, champion, side, names, most)
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
    ) -> list[Decision]:
        shown = side.shown if side is not None else "worker"
        awake = self.doze is None or self.doze.awake
        self.counters.asleep += not awake and shown == "worker"
        self._asked = len(names)
        self.cache.index(STEP_TOKENS if awake else 0)  # whoever decides: for all alike
        requests, drafts, rooms = self._drafts(
            names, shown if awake or shown == "stock" else "none"
        )
        owners = [row for row, draft in enumerate(drafts) if draft is not None]
        described = time.perf_counter()
        states = [state_of(requests[row], draft) for row, draft in enumerate(drafts) if draft]
        features = featurize(states, self._classes)
        side, wanted = self._wanted(
            side, champion, features, owners, len(requests), len(names), most
        )
        policy = side.policy if side is not None else champion
        arms = wanted.arms
        if shown == "worker":
            arms = self._looks.arms(
                arms, [d is not None for d in drafts],
                [r.length - r.drafted_at for r in requests], self.costs, self._last,
                relieved=side is None or side.name == CHAMPION,
            )  # fmt: skip
        self._side, self._began = side, began
        self._unpaid_us = (time.perf_counter() - described) * 1e6 if shown == "stock" else 0.0
        self.counters.probes = self._looks.taken
        draft_us = (time.perf_counter() - began) * 1e6
        step = Step(
            int(wanted.lengths.sum()), sum(len(s.draft.tokens) for s in states),
            int((wanted.arms == MODEL).sum()), len(names), time.time(),
            self.rate.value if policy.kind == "survival" else policy.threshold, wanted.model_len,
            arms.tolist(), wanted.arms.tolist(), wanted.lengths.tolist(), wanted.expected,
            wanted.model, features, draft_us, policy=policy,
            side=side.name if side is not None else "",
        )  # fmt: skip
        self._drafted = step.model_len if MODEL in step.arms else 0
        left = MAX_TOKENS if most is None else most
        decisions = self._decide(step, requests, drafts, rooms, states, left)
        self.counters.choose_us.append(draft_us)
        self._settled_us = 0.0
        now = self._spent(began)
        self._decided = now if names else 0.0  # what follows nobody's step is a pause
        if len(decisions) == len(names):
            return decisions
        found = {r.name: d for r, d in zip(requests, decisions, strict=True)}
        return [found.get(name, _NOTHING) for name in names]

    def _drafts(
        self, names: Sequence[str], shown: Shown
    ) -> tuple[list[Request], list[CacheDraft | None], list[int]]:
        """The requests that may have a draft, their cache drafts, and tokens of one at most."""
        requests: list[Request] = []
        drafts: list[CacheDraft | None] = []
        rooms: list[int] = []
        for name in names:
            request = self._requests.get(name)
            room = request.room(self._longest) if request is not None else 0
            if request is not None and room > 0:
                drafts.append(None if shown == "none" else self._propose(request, room, shown))
                requests.append(request)
                rooms.append(room)
        return requests, drafts, rooms

    def _wanted(
        self,
        side: Side | None,
        champion: Policy,
        features: FloatArray,
        owners: Sequence[int],
        n: int,
        rows: int,
        most: int | None,
    ) -> tuple[Side | None, Chosen]:
        """Who decides, and what; a side that cannot leaves it to the champion."""
        rule = self._choice if side is None or side.shown == "worker" else choose
        try:
            return side, rule(
                champion if side is None else side.policy, features, np.array(owners, np.int64),
                n, rows, self.costs.table, self.rate.value, self._model_len,
                odds=self.model_arm.odds, shorter=self._shorter, most=most,
            )  # fmt: skip
        except Exception:
            if side is None or self.turns is None or side.name == CHAMPION:
                raise
            self._complaints.exception(f"the side {side.name!r} plays no more: it could not choose")
            self.turns.fail(side)
        return self._wanted(None, champion, features, owners, n, rows, most)

    def _decide(
        self,
        step: Step,
        requests: Sequence[Request],
        drafts: Sequence[CacheDraft | None],
        rooms: Sequence[int],
        states: Sequence[DraftState],
        left: int,
    ) -> list[Decision]:
        """Open a cycle of each request; what it verifies, ``left`` draft tokens in all."""
        floor = self.floor if step.serves else None
        relieved = floor is not None and floor.in_force != "policy"
        decisions, found = [], 0
        for row, (request, draft, room) in enumerate(zip(requests, drafts, rooms, strict=True)):
            arm = step.arms[row]
            if draft is None:
                cycle = Cycle(step, row, -1, request.cycles, request.generated, 0, ())
            else:
                tokens = draft.tokens
                cycle = Cycle(
                    step, row, found, request.cycles, request.generated, len(tokens),
                    states[found].keys,
                )  # fmt: skip
                found += 1
                request.labels.propose(tokens, cycle)
            request.cycle = cycle
            request.cycles += 1
            request.history.took(arm == CACHE)
            if arm == CACHE and draft is not None:
                verified = tokens[: left if relieved else min(step.lengths[row], left)]
                cycle.drafted_len = len(verified)
                decisions.append(Decision("cache", verified, room))
            elif arm == MODEL:
                cycle.drafted_len = min(room, step.model_len, left)
                decisions.append(Decision("model", (), cycle.drafted_len))
            else:
                decisions.append(Decision("none", (), room))
            left -= cycle.drafted_len
        return decisions

    def drafted(self, names: Sequence[str], lengths: Sequence[int], k: int) -> None:
        """Take in what the engine made of the last choice.

        Args:
            lengths: draft tokens that each of ``names`` really has.
            k: tokens for which the model drafter really ran; 0 if it did not.
        """
        self._drafted = k
        for name, length in zip(names, lengths, strict=True):
            request = self._requests.get(name)
            cycle = request.cycle if request is not None else None
            if request is None or cycle is None:
                continue
            cycle.drafted_len = length
            if cycle.arm == MODEL:
                if length:
                    request.drafted_at = request.length
                else:
                    self.counters.undrafted += 1

    def settle(self, exposed: bool = True) -> None:
        """What the next choice does not need: accounts of the floor, and events.

        For an engine to call while the target runs; :meth:`observe` does what is left.

        Args:
            exposed: whether the engine waits for it, as on a CPU, where the target has run by then.
        """
        began = time.perf_counter()
        self._settle()
        took = (time.perf_counter() - began) * 1e6
        self._own_us += took
        if exposed:
            self._exposed_us += took
            self._settled_us += took

    def _settle(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        for request, label, censored in unsettled:
            try:
                self._weigh(request, label.subject, label.accepted)
            except Exception:  # noqa: BLE001 - told by the complaints
                self._complaints.exception("the floor could not weigh a cycle")
            self._sink.put(Resolved(self._events, request.name, request.options, label, censored))
            self._events += 1
            self.counters.labelled += label.subject.draft_len > 0

    def stop(self, name: str, reason: str) -> None:
        """Stop following a request: its open labels leave censored.

        Unknown names are ignored; never raises.
        """
        request = self._requests.pop(name, None)
        if request is None:
            return
        self.counters.stopped += 1
        if not self._requests:
            self._decided = 0.0  # nobody waits for the step any more: a pause begins
        try:
            for label in request.labels.close():
                self._resolve(request, label, censored=reason)
            self.cache.stop(name)
            self._memories.book(request.options.key)
        except Exception:  # noqa: BLE001 - told by the complaints
            self._complaints.exception("a request's last labels are lost: its bookkeeping failed")
            self.counters.left_out["fault"] += 1

    def _leave_out(self, request: Request, reason: str) -> None:
        """Follow a request no longer: what is known of it cannot be relied on."""
        self.counters.left_out[reason] += 1
        request.cycle = None
        self.stop(request.name, "lost")

    def close(self) -> None:
        """Stop every request: the worker is going down."""
        for name in list(self._requests):
            self.stop(name, "abort")
        self._settle()

    def _spent(self, began: float) -> float:
        """Book the router's own time since ``began``; the time it is now."""
        now = time.perf_counter()
        self._own_us += (now - began) * 1e6
        self._exposed_us += (now - began) * 1e6
        return now

    def _propose(self, request: Request, room: int, shown: Shown) -> CacheDraft | None:
        context = request.tokens[: request.length]
        try:
            if shown == "stock":
                return self.cache.propose(request.name, context, room, STOCK)
            return self.cache.propose(request.name, context, room)
        except Exception:  # noqa: BLE001 - told by the complaints
            self._complaints.exception("a request is left out of drafting: it cannot be looked up")
            self._leave_out(request, "fault")
            return None

    def _count(self, request: Request, cycle: Cycle, reported: int) -> None:
        # Nothing verified (a draft the scheduler had no room for) is a cycle of the arm "none".
        arm = ARMS[cycle.arm if cycle.verified_len else NONE]
        accepted = min(reported - 1, cycle.committed)
        self.counters.cycles[arm] += 1
        self.counters.drafted[arm] += cycle.verified_len
        self.counters.accepted[arm] += accepted
        if arm == "model" and cycle.committed == reported:
            cycle.model_accepted = accepted
            drafts = cycle.step.arms.count(MODEL)
            self.model_arm.observe(accepted, cycle.verified_len, drafts)
            whole = accepted == cycle.verified_len
            rest = self.model_arm.payoff(self._model_len - cycle.verified_len) if whole else 0.0
            request.history.learn_model(accepted + rest)

    def _weigh(self, request: Request, cycle: Cycle, accepted: int) -> None:
        """Tell the floor what each option would have made of this cycle."""
        if self.floor is None or not cycle.committed or not cycle.step.serves:
            return
        usual = float(cycle.step.model[cycle.row])
        foreseen = outcomes_of(cycle, accepted, usual, self.costs.table)
        self.floor.add(request.stretch, cycle.committed, foreseen, cycle.step.batch)

    def _resolve(self, request: Request, label: Label[Cycle], censored: str) -> None:
        cycle = label.subject
        if not label.censored:
            request.history.learn(label.accepted, cycle.draft_len, request.generated)
            request.memory.learn(cycle.keys, label.accepted, cycle.draft_len)
        self._unsettled.append((request, label, censored))


_NOTHING: Final = Decision("none")
