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
from decoder.core.payoff.token_classes import token_classes_of
from decoder.policy.first import first_or_counting
from decoder.policy.pricing import CostTable
from decoder.settings import WorkerSettings
from pipelines import stats
from pipelines.embedded import load_tokenizer
from pipelines.replay.engine import Simulator, Trace, drawn_by_position
from pipelines.replay.rules import ALONE, HYBRID, spent_by_rule
from pipelines.reports import Step
from pipelines.watch.ledger import Ledger, Phase

SEED: Final = 42
FEWEST: Final = 4
"""Answers of a kind of traffic from which an interval is drawn."""
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


def replayed(
    ledger: Ledger, phases: Sequence[Phase], answers: Answers, step: Step
) -> dict[str, Any]:
    """What each rule makes of the ``answers`` to ``phases``, JSON-ready: by kind of traffic the
    ratio of the policy's tokens a second over those of each rule, with the bounds of its interval
    over answers. Empty where there is nothing to decode, or the worker measured no prices."""
    settings, rng = WorkerSettings.load(), np.random.default_rng(SEED)
    length = settings.model_draft_tokens
    spans: dict[str, list[tuple[float, float]]] = {}
    for phase in phases:
        spans.setdefault(phase.kind, []).append((phase.began, phase.ended))
    chances = {kind: ledger.acceptance(some, length) for kind, some in spans.items()}
    every = [(p.kind, trace) for p in phases for trace in answers.get(p.name, ())]
    kinds = np.array([kind for kind, _ in every])
    statuses = [s for s in ledger.statuses if phases and s.time >= phases[0].began]
    statuses = [s for s in statuses if s.time < phases[-1].ended and "1" in s.step_us]
    if not every or not statuses:
        return {}
    traces = [
        replace(trace, model_accepted=drawn_by_position(chances[kind], len(trace.output), rng))
        for kind, trace in every
    ]
    policy, costs = policy_of(ledger, phases), cost_table(statuses, settings)
    router_us = float(np.median([s.exposed_us_p50 for s in statuses]))
    simulator = Simulator(token_classes_of(load_tokenizer(None)), settings, costs=costs)
    spent = spent_by_rule(
        traces, policy, simulator, step=step,
        router_us=lambda rule: 0.0 if rule.startswith(ALONE) else router_us,
    )  # fmt: skip
    return {
        "policy": ledger.named(policy.version),
        "step_us": dict(zip(costs.tokens, costs.verify_us, strict=True)),
        "draft_us": round(costs.drafting(length, 1), 1),
        "model_drafts": chances,
        "kinds": {
            kind: _compared({name: (n[mine], t[mine]) for name, (n, t) in spent.items()})
            for kind in chances
            # the first token of an answer comes with its prompt: of that alone nothing is decoded
            if (mine := kinds == kind).sum() >= FEWEST and spent[HYBRID][0][mine].any()
        },
    }


def _compared(spent: dict[str, stats.Spent]) -> dict[str, Any]:
    tokens, time = mine = spent.pop(HYBRID)
    rate, over = float(tokens.sum() / time.sum()), {}
    for rule, theirs in spent.items():
        low, high = stats.interval(mine, theirs) or (None, None)
        ratio = rate / float(theirs[0].sum() / theirs[1].sum())
        over[rule] = {"ratio": ratio, "low": low, "high": high}
    counts = {"answers": len(tokens), "tokens": int(tokens.sum())}
    return {**counts, "tok_per_s": 1e6 * rate, "over": over}
