"""Baselines that a policy is compared with, on the same recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import Policy
from pipelines.replay.engine import Simulator, Trace
from pipelines.replay.method import Method
from pipelines.replay.rivals import method
from pipelines.reports import Step
from pipelines.stats import Spent

HYBRID: Final = "hybrid"
ALONE: Final = ("greedy", "eagle3")  # baselines without a router
LONGER: Final = 2.0  # draft tokens for each matched token, in names that end in ``@2``


def rivals(model_len: int) -> dict[str, Method]:
    """The fixed baselines, and online counting, by name."""
    plain = ("greedy", "suffix", "frequency", "match4")
    rules = {name: method(name) for name in (*plain, "buckets")}
    for name in plain[1:]:
        rules[f"{name}@2"] = replace(method(name), draft_factor=LONGER)
    for k in range(1, model_len + 1):
        rules[f"eagle3:{k}"] = replace(method("eagle3"), model_limit=k)
    return rules


def spent_by_rule(
    traces: Sequence[Trace], policy: Policy, simulator: Simulator, warm_up: Sequence[Trace] = (),
    router_us: Callable[[str], float] = lambda rule: 0.0, step: Step = lambda what, done, n: None,
    others: Mapping[str, Method] = {},
) -> dict[str, Spent]:  # fmt: skip
    """Tokens and time of each recording by every baseline, by ``others``, and by the hybrid that
    decides by ``policy``.

    A learned policy has a worker's guards. Times are in the unit of the cost table; ``router_us``
    is the time of a rule's decision, added to each cycle.
    """
    spent, length = dict[str, Spent](), simulator.settings.model_draft_tokens
    rules = {**rivals(length), **others, HYBRID: Method(HYBRID, policy)}
    for done, (name, by) in enumerate(rules.items()):
        step("decoding by every rule, in virtual time", done, len(rules))
        learned = name == HYBRID and policy.kind == "survival"
        cycles, _ = simulator.decode(traces, by, warm_up, guarded=learned)
        times = cycles.times(simulator.costs) + router_us(name)
        spent[name] = by_trace(cycles.trace, len(traces), cycles.committed, times)
    return spent


def by_trace(trace: Any, n: int, tokens: Any, time: Any) -> Spent:
    """Sums of cycles' ``tokens`` and ``time`` by recording, each float64 [n]."""
    tokens, time = (np.bincount(trace, each, n).astype(np.float64) for each in (tokens, time))
    return tokens, time


NAMES: Final = {
    "greedy": "plain decoding",
    "suffix": "stock suffix decoding",
    "frequency": "counted frequency",
    "match4": "matches of four tokens",
    "buckets": "counts by source and length",
}


def name_of(rule: str) -> str:
    """The name of one of :func:`rivals` for people."""
    rule, _, twice = rule.partition("@")
    rule, _, tokens = rule.partition(":")
    if tokens:
        return f"EAGLE3 decoding of {tokens} token{'s' * (tokens != '1')}"
    return NAMES[rule] + " with drafts twice as long" * bool(twice)
