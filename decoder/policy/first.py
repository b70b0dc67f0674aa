"""The policy of a scope that has none of its own."""

from __future__ import annotations

from decoder.contracts.bundle import Policy, frequency_policy


def first_policy(scope: str) -> Policy:
    """What ``scope`` is served with before anything was learned for it: version 0."""
    return frequency_policy(scope)
