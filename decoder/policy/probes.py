"""Bundles with numerical probes: a worker checks that it reproduces the learner's predictions."""

from __future__ import annotations

from typing import Final

import numpy as np

from decoder.contracts.bundle import ANY_SCOPE, Policy, pack, unpack
from decoder.contracts.errors import PolicyRefused
from decoder.policy.estimate import predict

TOLERANCE: Final = 1e-3  # tokens. A worker whose predictions differ by more refuses the bundle.


def to_bytes(policy: Policy) -> bytes:
    """Serialise ``policy`` with its predictions for its probe inputs."""
    return pack(policy, predict(policy, policy.probe_inputs))


def from_bytes(data: bytes, scope: str | None = None) -> Policy:
    """Read, check and probe a bundle.

    Args:
        scope: if given, the bundle must be made for it or for any scope.

    Raises:
        PolicyRefused: as :func:`unpack`, for another scope, or for probe outputs that this machine
            does not reproduce. Nothing else is raised.
    """
    policy, outputs = unpack(data)
    if scope is not None and policy.scope not in (scope, ANY_SCOPE):
        raise PolicyRefused("scope", f"policy for scope {policy.scope}, this worker has {scope}")
    with np.errstate(all="ignore"):  # an overflow fails the comparison
        predicted = predict(policy, policy.probe_inputs)
        consistent = bool((np.abs(predicted - outputs) <= TOLERANCE).all())
    if not consistent:
        raise PolicyRefused("probe", "predictions here differ from those stored in the bundle")
    return policy
