"""The fixed arm that replaces the policy while the floor's fallback is active."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.core.guards.floor import Floor
from decoder.policy.rule import CACHE, MODEL, NONE, Arms


def fallback_arms(arms: Arms, floor: Floor, candidates: NDArray[Any]) -> Arms:
    """Arms [n] of the option that the floor has chosen.

    Args:
        arms: the policy's choice.
        candidates: :data:`~decoder.policy.rule.CANDIDATE` [n].
    """
    if floor.in_force == "policy":
        return arms
    fixed = np.full(len(arms), MODEL if floor.in_force == "model" else NONE, np.int8)
    if floor.in_force == "cache":
        fixed[candidates["draft"] >= 0] = CACHE
    if floor.in_force == "model":
        unable = candidates["unable"] > 0
        fixed[unable] = arms[unable]
    return fixed
