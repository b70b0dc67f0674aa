"""Whole bundles: a policy with probes that show a worker whether its arithmetic is the maker's."""

from __future__ import annotations

from typing import Final

import numpy as np

from decoder.contracts.bundle import ANY_SCOPE, Policy, pack, unpack
from decoder.contracts.errors import PolicyRefused
from decoder.policy.estimate import predict

TOLERANCE: Final = 1e-3
"""Tokens. A worker whose arithmetic strays further from the learner's refuses the bundle."""


def to_bytes(policy: Policy) -> bytes:
    """``policy`` as a bundle, with what it predicts for its probes."""
    return pack(policy, predict(policy, policy.probe_inputs))


def from_bytes(data: bytes, scope: str | None = None) -> Policy:
    """Read, check and probe a bundle.

    Args:
        scope: when given, the scope the bundle must be made for; one that is made for any scope
            is for this one too.

    Raises:
        PolicyRefused: as :func:`unpack`, and nothing else; also for another scope, or for probe
            outputs that this machine does not reproduce.
    """
    policy, outputs = unpack(data)
    if scope is not None and policy.scope not in (scope, ANY_SCOPE):
        raise PolicyRefused("scope", f"policy for scope {policy.scope}, this worker has {scope}")
    with np.errstate(all="ignore"):  # what overflows is not what its maker saw
        probed = predict(policy, policy.probe_inputs)
        alike = bool((np.abs(probed - outputs) <= TOLERANCE).all())
    if not alike:
        raise PolicyRefused("probe", "policy bundle predicts other payoffs here than where made")
    return policy
