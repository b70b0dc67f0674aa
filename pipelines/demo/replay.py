"""The demo's own answers, decoded once more by every rule in virtual time.

Each rule decodes the same text, one request at a time, and pays for each step what the worker
measured that steps of so many tokens take: no clock's noise, and no luck of who got which text.
What a model draft has accepted is drawn, once for all rules, from the curve that the worker's own
model drafts showed in the phase. Prompts and answers stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.status import WorkerStatus
from decoder.core.guards.floor import Floor
from decoder.core.payoff.token_classes import token_classes_of
from decoder.engines.reference.method import Method
from decoder.policy.first import first_or_counting
from decoder.policy.pricing import CostTable
from decoder.settings import WorkerSettings
from pipelines import stats
from pipelines.embedded import load_tokenizer
from pipelines.replay.engine import Simulator, Trace, drawn_by_place
from pipelines.replay.rules import HYBRID, by_trace, rivals
from pipelines.reports import Step
from pipelines.watch.ledger import Ledger, Phase

SEED: Final = 42
MOST_TOKENS: Final = 24_000
"""Tokens of answers that are decoded, of every kind of traffic as many: a minute on slow cores."""
FEWEST: Final = 4
"""Answers of a kind of traffic from which an interval is drawn."""
WITHOUT_ROUTER: Final = ("greedy", "eagle3")
"""Rules that look for no cache draft."""

Answers = Mapping[str, Sequence[Trace]]
"""Prompts and answers by the name of their phase, in the order in which they were answered."""


def cost_table(statuses: Sequence[WorkerStatus], settings: WorkerSettings) -> CostTable:
    """What a worker said that steps and drafting cost, microseconds: the median over its
    ``statuses``, since one that followed a stall is off.

    Raises:
        ValueError: it has measured nothing.
    """
    told = [s for s in statuses if "1" in s.step_us]
    sizes = sorted({int(tokens) for s in told for tokens in s.step_us})
    times = [
        max(float(np.median([s.step_us.get(str(n), s.step_us["1"]) for s in told])), 1.0)
        for n in sizes
    ]
    drafting = float(np.median([s.draft_us for s in told])) if told else 0.0
    return CostTable(
        "measured", tuple(sizes), tuple(accumulate(times, max)),
        draft_token_us=drafting / settings.model_draft_tokens,
    )  # fmt: skip


def policy_of(ledger: Ledger, phases: Sequence[Phase]) -> Policy:
    """The policy that decided most cache drafts of ``phases``; the first policy where none did, or
    what it was is not known any more."""
    drafts: dict[int, int] = {}
    for phase in phases:
        for version, seen in ledger.foresight(phase.began, phase.ended).items():
            drafts[version] = drafts.get(version, 0) + seen.drafts
    version = max(drafts, key=drafts.__getitem__, default=0)
    known = [p.policy for p in ledger.published if p.policy and p.policy.version == version]
    return known[-1] if version and known else first_or_counting(ledger.scope)


def with_acceptance(
    ledger: Ledger, phases: Sequence[Phase], answers: Answers, settings: WorkerSettings
) -> list[tuple[str, Trace]]:
    """The answers of ``phases`` in their order, each with its kind of traffic and what model drafts
    have accepted at each of its positions. Of a kind there are :data:`MOST_TOKENS` at most."""
    rng, made, spent = np.random.default_rng(SEED), list[tuple[str, Trace]](), dict[str, int]()
    share = MOST_TOKENS // max(len({phase.kind for phase in phases}), 1)
    for phase in phases:
        spans = [(p.began, p.ended) for p in phases if p.kind == phase.kind]
        chances = ledger.acceptance(spans, settings.model_draft_tokens)
        for trace in answers.get(phase.name, ()):
            spent[phase.kind] = spent.get(phase.kind, 0) + len(trace.output)
            if spent[phase.kind] <= share:
                accepted = drawn_by_place(chances, len(trace.output), rng)
                made.append((phase.kind, replace(trace, model_accepted=accepted)))
    return made


def replayed(
    ledger: Ledger, phases: Sequence[Phase], answers: Answers, step: Step
) -> dict[str, Any]:
    """What each rule makes of the ``answers`` to ``phases``, JSON-ready: by kind of traffic the
    ratio of the policy's tokens a second over those of each rule, with the bounds of its interval
    over answers. Empty where there is nothing to decode, or the worker measured no prices."""
    settings = WorkerSettings.load()
    made = with_acceptance(ledger, phases, answers, settings)
    began, ended = (phases[0].began, phases[-1].ended) if phases else (0.0, 0.0)
    statuses = [s for s in ledger.statuses if began <= s.time < ended and "1" in s.step_us]
    if not made or not statuses:
        return {}
    policy, costs = policy_of(ledger, phases), cost_table(statuses, settings)
    router_us = float(np.median([s.exposed_us_p50 for s in statuses]))
    kinds, traces = np.array([kind for kind, _ in made]), [trace for _, trace in made]
    simulator = Simulator(token_classes_of(load_tokenizer(None)), settings, costs=costs)
    rules = {**rivals(settings.model_draft_tokens), HYBRID: Method(HYBRID, policy)}
    spent = dict[str, stats.Spent]()
    for done, (name, by) in enumerate(rules.items()):
        step("decoding the answers once more by every rule", done, len(rules))
        floor = Floor(True) if name == HYBRID and policy.kind == "survival" else None
        cycles, _ = simulator.decode(traces, by, floor=floor)
        times = cycles.times(simulator.costs)
        times += 0.0 if name.startswith(WITHOUT_ROUTER) else router_us
        spent[name] = by_trace(cycles.trace, len(traces), cycles.committed, times)
    found = {
        kind: _compared({name: (n[mine], t[mine]) for name, (n, t) in spent.items()})
        for kind in dict.fromkeys(kinds.tolist())
        if (mine := kinds == kind).sum() >= FEWEST
    }
    return {
        "policy": ledger.named(policy.version),
        "step_us": dict(zip(costs.tokens, costs.verify_us, strict=True)),
        "draft_us": round(costs.drafting(settings.model_draft_tokens, 1), 1),
        "model_drafts": {
            phase.kind: ledger.acceptance([(phase.began, phase.ended)], settings.model_draft_tokens)
            for phase in phases
        },
        "kinds": found,
    }


def _compared(spent: Mapping[str, stats.Spent]) -> dict[str, Any]:
    mine = spent[HYBRID]
    rate = float(mine[0].sum() / mine[1].sum())
    over = {}
    for rule, theirs in spent.items():
        bounds = stats.interval(mine, theirs)
        if rule != HYBRID and bounds is not None:
            ratio = rate / float(theirs[0].sum() / theirs[1].sum())
            low, high = bounds
            over[rule] = {"ratio": round(ratio, 4), "low": round(low, 4), "high": round(high, 4)}
    counts = {"answers": len(mine[0]), "tokens": int(mine[0].sum())}
    return {**counts, "tok_per_s": round(1e6 * rate, 2), "over": over}
