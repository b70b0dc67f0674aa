"""What is verified while the floor has a fixed arm in the place of the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.core.guards.floor import Floor
from decoder.policy.rule import CACHE, MODEL, NONE, Arms


def fallback_arms(arms: Arms, floor: Floor, candidates: NDArray[Any]) -> Arms:
    """The arms [n] of whoever the floor has in force.

    Args:
        arms: that the policy wants.
        candidates: of :data:`~decoder.policy.rule.CANDIDATE` [n].
    """
    if floor.in_force == "policy":
        return arms
    taken = np.full(len(arms), MODEL if floor.in_force == "model" else NONE, np.int8)
    if floor.in_force == "cache":
        taken[candidates["draft"] >= 0] = CACHE
    if floor.in_force == "model":
        unable = candidates["unable"] > 0
        taken[unable] = arms[unable]
    return taken
