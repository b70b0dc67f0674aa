"""The first policy's place in the registry, so that a person finds what serves there."""

from __future__ import annotations

from dataclasses import replace

from decoder.contracts.bundle import CHAMPION
from decoder.policy.first import first_policy
from decoder.scope import scope_of
from learner.registry import Registry
from pipelines.embedded import drafter_path, ensure_model


def embedded_scope() -> str:
    """Scope of the embedded target with the shipped drafter."""
    drafter = drafter_path()
    return scope_of(str(ensure_model()), str(drafter) if drafter else None)


def ensure_registered(tracking_uri: str) -> int:
    """Register the first policy as the embedded scope's first champion, if it has none.

    Returns:
        the version that is champion.

    Raises:
        PolicyRefused: the first policy's file is missing or unusable.
    """
    scope, registry = embedded_scope(), Registry(tracking_uri)
    champion = registry.champion(scope)
    if champion is not None:
        return champion.version
    policy = replace(first_policy(scope), role=CHAMPION)
    scores = policy.provenance.get("scores", {})
    version = registry.register(policy, params={"source": "first policy"}, metrics=scores)
    registry.promote(scope, version)
    return version
