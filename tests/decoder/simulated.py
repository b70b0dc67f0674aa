"""A target that is a list of tokens, a drafter that is a list of lengths, and time by a cost table.

Deterministic: what an engine would have measured is computed, so that regret is a number and not a
matter of how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from decoder.contracts.bundle import BUCKETS, Policy, frequency_policy
from decoder.contracts.features import FEATURE_ROW, NUM_FEATURES
from decoder.core.choice import Chosen, Step, choose, inputs_of
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.requests import Decisions, RequestOptions, StepReport
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.policy.loops import yields_of_places
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CANDIDATE, MODEL
from decoder.settings import WorkerSettings
from tests.conftest import VOCABULARY, naive_accepted_length
from tests.events import KeepingLog

K = 4
CLASSES = np.zeros((VOCABULARY, 6), np.float32)
Accepts = Callable[[int], int]
"""Accepted length of the model draft at an output position."""


def waiting(cache: SuffixCache) -> int:
    """Requests whose prompts are not fully indexed."""
    text = cache.pool.windows[list(cache._active.values())]
    return int((text["linked"] < text["last"]).sum())


def yields_of(chance: float, k: int) -> list[float]:
    """Expected accepted lengths of model drafts of 1 to ``k`` tokens, each held with ``chance``."""
    return yields_of_places(np.full(k, np.log(chance / (1 - chance))), k).tolist()


def trusting_policy(hazard: float = 0.01, chance: float = 0.6) -> Policy:
    """A survival policy that expects the same of every draft, whatever it looks like."""
    bias = np.full(BUCKETS + 1, np.log(hazard / (1 - hazard)), np.float32)
    bias[BUCKETS] = np.log(chance / (1 - chance))
    layers = ((np.zeros((NUM_FEATURES, BUCKETS + 1), np.float32), bias),)
    return Policy("s", 1, 2.0, "survival", layers=layers,
                  model_payoff=yields_of(chance, 4)[-1])  # fmt: skip


@dataclass
class Wanted:
    """What a policy wants of the requests of a step."""

    arms: np.ndarray
    lengths: np.ndarray
    expected: np.ndarray
    model: np.ndarray
    model_len: int
    model_gain: float


def wanted_of(
    policy: Policy, features: np.ndarray, owners: np.ndarray, n: int, costs: CostTable,
    rate: float, k: int, *, odds: np.ndarray | None = None, budget: int | None = None,
    unable: Sequence[int] = (), prefill: int = 0,
) -> Wanted:  # fmt: skip
    """What ``policy`` wants of ``n`` requests of a step, of which ``owners`` have the cache drafts
    with ``features``, and those ``unable`` can have no model draft."""
    candidates = np.zeros(n, CANDIDATE)
    candidates["draft"] = -1
    candidates["draft"][owners] = np.arange(len(owners))
    candidates["unable"][list(unable)] = 1
    inputs = inputs_of(n, rate, k, costs, budget, prefill)
    odds = np.zeros(16) if odds is None else odds
    drafts = np.ascontiguousarray(features, np.float32).view(FEATURE_ROW).reshape(-1)
    chosen = choose(policy, Step(candidates, drafts, inputs, costs, odds))
    fields = (candidates[name].copy() for name in ("policy_arm", "length", "expected", "model"))
    return Wanted(*fields, *chosen)


def model_alone(k: int) -> Callable[..., Chosen]:
    """A rule that takes the model arm always, with drafts of ``k`` tokens."""

    def chosen(policy: Policy, step: Step) -> Chosen:
        step.candidates["policy_arm"], step.candidates["length"] = MODEL, k
        step.candidates["expected"] = step.candidates["model"] = 0.0
        return Chosen(k)

    return chosen


@dataclass
class Phase:
    """What a stretch of traffic is like."""

    text: Sequence[int]
    accepts: Accepts
    table: CostTable
    batch: int = 1


@dataclass
class Run:
    """Tokens, time and arm of every cycle."""

    tokens: list[float] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)

    def rate(self, first: int, last: int | None = None) -> float:
        return sum(self.tokens[first:last]) / sum(self.time[first:last])


class Committed(NamedTuple):
    """One request's outcome: tokens committed, draft tokens verified, and the engine's length."""

    request: str
    tokens: Sequence[int]
    verified_len: int
    length: int = 0


class Router(DraftRouter):
    """With a cache, and a sink that keeps its events; a number stands for counting from it on. It
    may be spoken to by names and outcomes in the place of reports."""

    def __init__(
        self, policy: Policy | float = 0.0, has_model: bool = False, *,
        cache: SuffixCache | None = None, classes: np.ndarray = CLASSES, sink: Sink | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.kept = KeepingLog()
        policy = policy if isinstance(policy, Policy) else frequency_policy("s", policy)
        cache = cache or SuffixCache(WorkerSettings())
        options["model_len"] = K * has_model
        super().__init__(cache, policy, classes, sink or self.kept, **options)
        self._told = self.report(())

    def observe(  # type: ignore[override]
        self, told: StepReport | Sequence[Committed], step_tokens: int = 0, usual: bool = True
    ) -> None:
        if not isinstance(told, StepReport):
            names, tokens, verified, lengths = zip(*told, strict=True) if told else ((),) * 4
            told = self.report(names, tokens, verified, lengths, step_tokens)
            told.timed = usual
        super().observe(told)

    def choose(  # type: ignore[override]
        self, told: StepReport | Sequence[str], budget: int | None = None,
        unable: Collection[str] = (), *, others: int = 0, waiting: int = 0,
    ) -> Decisions:  # fmt: skip
        if not isinstance(told, StepReport):
            told = self.report(told)
            told.budget, told.unable, told.others, told.waiting = budget, unable, others, waiting
        self._told = told
        return super().choose(told)

    def drafted(  # type: ignore[override]
        self, names: Sequence[str], lengths: Sequence[int], k: int
    ) -> None:
        made = dict(zip(names, lengths, strict=True))
        super().drafted(self._told, [made.get(name, 0) for name in self._told.names], k)

    def begin(self, names: Sequence[str], prompt: Sequence[int]) -> None:
        """Start requests, each of which repeats the first token of its prompt."""
        for name in names:
            self.start(name, np.array(prompt, np.int32), RequestOptions(400, 4096))
            self.observe([Committed(name, [prompt[0]], 0, len(prompt) + 1)], len(prompt))


def decode_all(
    router: DraftRouter, name: str, prompt: list[int], output: list[int], options: RequestOptions
) -> None:
    """Decode ``output`` as an engine does: what agrees is accepted, and a token added."""
    router.start(name, np.array(prompt, np.int32), options)
    report = router.report([name], [output[:1]], 0, 0, 1)
    router.observe(report)
    done = 1
    while name in router and done < len(output):
        draft = list(router.choose(report)[0].tokens)
        committed = output[done : done + naive_accepted_length(draft, output[done:]) + 1]
        done += len(committed)
        report = router.report([name], [committed], len(draft), 0, 1 + len(draft))
        router.observe(report)
    router.stop(name, "abort")
    router.flush()


def make_router(policy: Policy, has_model: bool, floor: bool) -> Router:
    return Router(policy, has_model, guarded=floor)


def fixed(arm: str) -> tuple[Policy, bool]:
    """Policy and drafter of a method that always takes ``arm``."""
    threshold = 0.0 if arm == "cache" else float("inf")
    return frequency_policy("s", threshold), arm == "model"


def decode(
    router: Router,
    phase: Phase,
    run: Run,
    prompt: Sequence[int],
    name: str,
    costs: LiveCosts | None = None,
) -> None:
    """Decode the phase's text for ``batch`` requests side by side. Extends ``run``."""
    router.costs = costs or LiveCosts(phase.table, live=False)
    names = [f"{name}/{i}" for i in range(phase.batch)]
    done = dict.fromkeys(names, 1)
    text = list(phase.text)
    for each in names:
        router.start(each, np.array(prompt, np.int32), RequestOptions(1 << 20, 1 << 21))
        router.observe([Committed(each, text[:1], 0)], len(prompt))
    while all(position < len(text) for position in done.values()):
        decisions = router.choose(names)
        outcomes, drafted = [], 0
        for each, decision in zip(names, decisions, strict=True):
            at = done[each]
            verified = accepted = 0
            if decision.arm == "cache":
                verified = len(decision.tokens)
                accepted = naive_accepted_length(decision.tokens, text[at:])
            elif decision.arm == "model":
                verified = decision.room
                drafted, accepted = max(drafted, verified), min(phase.accepts(at), verified)
            committed = text[at : at + accepted + 1]
            done[each] = at + len(committed)
            outcomes.append(Committed(each, committed, verified))
            run.arms.append(decision.arm)
        step = sum(1 + o.verified_len for o in outcomes)
        router.observe(outcomes, step)
        run.tokens.append(sum(len(o.tokens) for o in outcomes))
        drafting = phase.table.drafting(drafted, len(names))
        run.time.append(float(phase.table.dense[step]) + drafting)
    for each in names:
        router.stop(each, "abort")
