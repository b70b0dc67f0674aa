"""The requests that a worker follows, each through its cycles, from its prompt to its last label.

One whose text is not the engine's, or whose bookkeeping fails, is left out by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from decoder.complaints import Complaints
from decoder.core.counters import Counters
from decoder.core.labels import Label
from decoder.core.payoff.featurize import DraftState
from decoder.core.payoff.memory import History, TenantMemories
from decoder.core.payoff.model_arm import ModelArm
from decoder.core.requests import Committed, Cycle, Decision, Request, RequestOptions, Step
from decoder.drafting.drafts import STOCK, CacheDraft, Tokens
from decoder.drafting.suffix import SuffixCache
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE
from decoder.trial.block import Groups
from decoder.trial.sides import Shown

INITIAL_ROOM: Final = 1024
"""Tokens of growth reserved at start, so that most requests never copy their prefix."""


class Proposed(NamedTuple):
    """The requests that may have a draft; of each its cache draft, and tokens at most."""

    requests: list[Request]
    drafts: list[CacheDraft | None]
    rooms: list[int]


class Taken(NamedTuple):
    """What a step committed: of all requests, and of the cycles that it closed.

    ``tokens`` are all, ``decoded`` those of ``cycles``, which verified ``verified`` draft tokens.
    """

    tokens: int
    decoded: int
    cycles: int
    verified: int
    groups: Groups


class Followed:
    """Requests by name. ``unsettled`` holds cycles of which all is known, until they are told."""

    def __init__(
        self,
        cache: SuffixCache,
        model_arm: ModelArm,
        model_len: int,
        longest: int,
        counters: Counters,
        complaints: Complaints,
    ) -> None:
        """``model_len`` and ``longest`` are tokens of a model draft, and of any, at most."""
        self.requests: dict[str, Request] = {}
        self.unsettled: list[tuple[Request, Label[Cycle], str]] = []
        self._cache = cache
        self._memories = TenantMemories(cache.memory_bytes)
        self._model_arm, self._model_len, self._longest = model_arm, model_len, longest
        self._counters, self._complaints = counters, complaints

    def start(
        self, name: str, prompt: Tokens, options: RequestOptions, output: Sequence[int]
    ) -> None:
        """Begin to follow a request; see :meth:`decoder.core.router.DraftRouter.start`."""
        written = len(prompt) + len(output)
        grown = np.empty(written + INITIAL_ROOM, np.int32)
        grown[: len(prompt)], grown[len(prompt) : written] = prompt, output
        started = Request(
            name, options, grown, len(prompt), len(prompt), self._memories.of(options.key),
            tuple(grown[max(len(prompt) - 2, 0) : len(prompt)].tolist()),
            History(model=self._model_arm.payoff(self._model_len))
            if self._model_len else History(),
        )  # fmt: skip
        if len(output):
            started.append(output)
        # As one text: what a request wrote before it was met is not written for others again. One
        # that may have no draft has nothing to copy from it.
        self._cache.start(name, grown[: written if started.left > 0 else 0], options.key)
        self.requests[name] = started
        self._counters.started += 1

    def propose(self, names: Sequence[str], shown: Shown) -> Proposed:
        """Look up the cache drafts that are ``shown``, of those that may have a draft."""
        found = Proposed([], [], [])
        for name in names:
            request = self.requests.get(name)
            room = request.room(self._longest) if request is not None else 0
            if request is not None and room > 0:
                found.requests.append(request)
                found.rooms.append(room)
        if shown == "none":
            found.drafts.extend([None] * len(found.rooms))
            return found
        with suppress(Exception):  # of one of them: which it is, is told below
            found.drafts.extend(self._drafts(found.requests, found.rooms, shown))
            return found
        for request, room in zip(found.requests, found.rooms, strict=True):
            found.drafts.append(self._alone(request, room, shown))
        return found

    def _drafts(
        self, requests: Sequence[Request], rooms: Sequence[int], shown: Shown
    ) -> list[CacheDraft | None]:
        return self._cache.propose_all(
            [r.name for r in requests], [r.tokens[: r.length] for r in requests], rooms,
            STOCK if shown == "stock" else None,
        )  # fmt: skip

    def _alone(self, request: Request, room: int, shown: Shown) -> CacheDraft | None:
        try:
            return self._drafts([request], [room], shown)[0]
        except Exception:  # noqa: BLE001 - told by the complaints
            self._complaints.exception("a request is left out of drafting: it cannot be looked up")
            self._leave_out(request, "fault")
            return None

    def begin(
        self,
        step: Step,
        proposed: Proposed,
        states: Sequence[DraftState],
        left: int,
        whole: bool,
    ) -> list[Decision]:
        """Open a cycle of each request; what it verifies, ``left`` draft tokens in all.

        ``whole`` cache drafts are verified where the floor and not the policy is in force.
        """
        decisions, found = [], 0
        for row, (request, draft, room) in enumerate(zip(*proposed, strict=True)):
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
                verified = tokens[: left if whole else min(step.lengths[row], left)]
                cycle.drafted_len = len(verified)
                decisions.append(Decision("cache", verified, room))
            elif arm == MODEL:
                cycle.drafted_len = min(room, step.model_len, left)
                decisions.append(Decision("model", (), cycle.drafted_len))
            else:
                decisions.append(Decision("none", (), room))
            left -= cycle.drafted_len
        return decisions

    def drafted(self, names: Sequence[str], lengths: Sequence[int]) -> None:
        """Take in how many draft tokens each of ``names`` really has."""
        for name, length in zip(names, lengths, strict=True):
            request = self.requests.get(name)
            cycle = request.cycle if request is not None else None
            if request is None or cycle is None or cycle.made:
                continue  # one made before waits for its request to be scheduled again
            cycle.made, cycle.drafted_len = True, length
            if cycle.arm == MODEL:
                if length:
                    request.drafted_at = request.length
                else:
                    self._counters.undrafted += 1

    def take(
        self, outcomes: Sequence[Committed], step_tokens: int, step_us: float, grouped: bool
    ) -> Taken:
        """Take in what a step committed; labels resolve.

        Args:
            grouped: whether tokens are told by tenant and workload, too.
        """
        counters = self._counters
        decoded, verified, cycles, before = 0, 0, 0, counters.tokens
        groups: Groups = {}
        for outcome in outcomes:
            request = self.requests.get(outcome.request)
            if request is None or request.ended:
                continue
            known = counters.tokens
            try:
                made = self._take(request, outcome, step_tokens, step_us)
            except Exception:  # noqa: BLE001 - told by the complaints
                self._complaints.exception(
                    "a request is left out of drafting: its bookkeeping failed"
                )
                self._leave_out(request, "fault")
                continue
            if grouped:
                group = groups.setdefault(
                    (request.options.tenant, request.options.workload), [0, 0]
                )
                group[0] += counters.tokens - known
                group[1] += 1
            if made is not None:
                decoded, cycles = decoded + made, cycles + 1
                verified += outcome.verified_len
        self._cache.write()
        return Taken(counters.tokens - before, decoded, cycles, verified, groups)

    def _take(
        self, request: Request, outcome: Committed, step_tokens: int, step_us: float
    ) -> int | None:
        """Take in one request's outcome; tokens committed if they close a cycle."""
        committed = request.until_end(outcome.tokens)
        cycle, request.cycle = request.cycle, None
        self._counters.tokens += len(committed)
        request.append(committed)
        if outcome.length and not request.ended and request.length != outcome.length:
            self._leave_out(request, "length")
            return None
        if cycle is not None:
            cycle.verified_len = outcome.verified_len
            self._ran(cycle, step_tokens, step_us)
            cycle.committed = len(committed)
            self._count(request, cycle, len(outcome.tokens))
            if not cycle.draft_len:
                self.unsettled.append((request, Label(cycle, 0, censored=False), ""))
        self._cache.extend(request.name, committed)
        for label in request.labels.commit(committed):
            self._resolve(request, label, censored="")
        if request.ended:
            self.stop(request.name, request.ended)
        return None if cycle is None else len(committed)

    def _ran(self, cycle: Cycle, tokens: int, us: float) -> None:
        """Say what the step took in which a cycle was closed. Mutates its step.

        A request that was preempted, or not scheduled, closes its cycle later than others of the
        step that was chosen for both: what those took stays theirs.
        """
        step = cycle.step
        if step.tokens and (step.tokens, step.us) != (tokens, us):
            cycle.step = step = replace(step)
        step.tokens, step.us = tokens, us

    def _count(self, request: Request, cycle: Cycle, reported: int) -> None:
        # Nothing verified (a draft the scheduler had no room for) is a cycle of the arm "none".
        arm = ARMS[cycle.arm if cycle.verified_len else NONE]
        accepted = min(reported - 1, cycle.committed)
        self._counters.cycles[arm] += 1
        self._counters.drafted[arm] += cycle.verified_len
        self._counters.accepted[arm] += accepted
        if arm == "model" and cycle.committed == reported:
            cycle.model_accepted = accepted
            drafts = cycle.step.arms.count(MODEL)
            self._model_arm.observe(accepted, cycle.verified_len, drafts)
            whole = accepted == cycle.verified_len
            rest = self._model_arm.payoff(self._model_len - cycle.verified_len) if whole else 0.0
            request.history.learn_model(accepted + rest)

    def _resolve(self, request: Request, label: Label[Cycle], censored: str) -> None:
        cycle = label.subject
        if not label.censored:
            request.history.learn(label.accepted, cycle.draft_len, request.generated)
            request.memory.learn(cycle.keys, label.accepted, cycle.draft_len)
        self.unsettled.append((request, label, censored))

    def stop(self, name: str, reason: str) -> bool:
        """Stop following a request: its open labels leave censored; whether it was known.

        Never raises.
        """
        request = self.requests.pop(name, None)
        if request is None:
            return False
        self._counters.stopped += 1
        try:
            for label in request.labels.close():
                self._resolve(request, label, censored=reason)
            self._cache.stop(name)
            self._memories.book(request.options.key)
        except Exception:  # noqa: BLE001 - told by the complaints
            self._complaints.exception("a request's last labels are lost: its bookkeeping failed")
            self._counters.left_out["fault"] += 1
        return True

    def _leave_out(self, request: Request, reason: str) -> None:
        """Follow a request no longer: what is known of it cannot be relied on."""
        self._counters.left_out[reason] += 1
        request.cycle = None
        self.stop(request.name, "lost")
