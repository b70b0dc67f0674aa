"""Every rule that a policy is compared with, and what each makes of the same recordings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from decoder.engines.reference.method import Method, method
from pipelines.stats import Spent

HYBRID: Final = "hybrid"
LONGER: Final = 2.0
"""Tokens of a cache draft for each one matched, where a name ends in ``@2``."""


def rivals(model_len: int) -> dict[str, Method]:
    """Every fixed rule, and counting that learns as it goes, by name."""
    plain = ("greedy", "suffix", "frequency", "match4")
    found = {name: method(name) for name in (*plain, "buckets")}
    for name in plain[1:]:
        found[f"{name}@2"] = replace(method(name), draft_factor=LONGER)
    for k in range(1, model_len + 1):
        found[f"eagle3:{k}"] = replace(method("eagle3"), model_limit=k)
    return found


def by_trace(trace: Any, n: int, tokens: Any, time: Any) -> Spent:
    """Sums of ``tokens`` and ``time`` of cycles by their recording, each float64 [n]."""
    return (
        np.bincount(trace, tokens, n).astype(np.float64),
        np.bincount(trace, time, n).astype(np.float64),
    )


NAMES: Final = {
    "greedy": "plain decoding",
    "suffix": "stock suffix decoding",
    "frequency": "counted frequency",
    "match4": "matches of four tokens",
    "buckets": "counts by source and length",
}


def name_of(rule: str) -> str:
    """One of :func:`rivals` in words."""
    rule, _, twice = rule.partition("@")
    rule, _, tokens = rule.partition(":")
    if tokens:
        return f"EAGLE3 decoding of {tokens} token{'s' * (tokens != '1')}"
    return NAMES[rule] + " with drafts twice as long" * bool(twice)
