"""What becomes of a decision where the target and the drafter are a recording."""

from __future__ import annotations

from collections.abc import Sequence

from decoder.labels import common_prefix
from decoder.router import Decision


def verified(
    decision: Decision, output: Sequence[int], model: Sequence[int], done: int
) -> tuple[int, int]:
    """Draft tokens verified and accepted after ``done`` tokens of ``output``, tails left out.

    Args:
        model: accepted length of a model draft at each position of ``output``; empty without a
            model drafter, when nobody decides for one.
    """
    if decision.arm == "cache":
        draft = decision.tokens
        return len(draft), common_prefix(draft, output[done : done + len(draft)])
    if decision.arm == "model":
        return decision.room, min(model[done], decision.room)
    return 0, 0
