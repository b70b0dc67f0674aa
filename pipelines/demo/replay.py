"""Decodes the demo's own answers again by every rule, in virtual time.

Each rule decodes the same text, one request at a time, at the step times that the worker measured,
so there is no measurement noise. A model draft's acceptance is drawn, once for all rules, from the
curve that the worker's model drafts showed in the phase. Prompts and answers stay in memory.
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
FEWEST: Final = 4  # fewest answers of a kind of traffic for an interval
Answers = Mapping[str, Sequence[Trace]]  # prompts and answers by phase, in the order of answering


def cost_table(statuses: Sequence[WorkerStatus], settings: WorkerSettings) -> CostTable:
    """The costs of steps and drafting that a worker measured, in microseconds: medians over its
    ``statuses``, since one after a stall is an outlier.

    Raises:
        ValueError: it has measured nothing.
    """
    measured = [s for s in statuses if "1" in s.step_us]
    sizes = sorted({int(tokens) for s in measured for tokens in s.step_us})
    times = [
        max(float(np.median([s.step_us.get(str(n), s.step_us["1"]) for s in measured])), 1.0)
        for n in sizes
    ]
    drafting = float(np.median([s.draft_us for s in measured])) if measured else 0.0
    return CostTable(
        "measured", tuple(sizes), tuple(accumulate(times, max)),
        draft_token_us=drafting / settings.model_draft_tokens,
    )  # fmt: skip


def policy_of(ledger: Ledger, phases: Sequence[Phase]) -> Policy:
    """The policy that decided most cache drafts of ``phases``; the first policy if none did or it
    is unknown."""
    drafts: dict[int, int] = {}
    for phase in phases:
        for version, seen in ledger.calibration(phase.began, phase.ended).items():
            drafts[version] = drafts.get(version, 0) + seen.drafts
    version = max(drafts, key=drafts.__getitem__, default=0)
    known = [p.policy for p in ledger.published if p.policy and p.policy.version == version]
    return known[-1] if version and known else first_or_counting(ledger.scope)


def replayed(
    ledger: Ledger, phases: Sequence[Phase], answers: Answers, step: Step
) -> dict[str, Any]:
    """Decode the ``answers`` of ``phases`` by each rule. Returns JSON-ready: by kind of traffic,
    the ratio of the policy's tokens a second to each rule's, with the bounds of its interval over
    answers. Empty if there is nothing to decode or no measured costs."""
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
            # an answer of one token, from the prefill, has no cycle
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
