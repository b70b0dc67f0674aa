"""Who may decide in a block of steps: each side is a policy, and what it is shown to decide on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from decoder.contracts.bundle import Policy
from decoder.contracts.features import SCHEMA_ID
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX

OUTSIDE: Final = "outside"
"""Under which steps are summed up that no block took in."""
_NEVER: Final = 1e9
"""Accepted tokens that no draft is expected to reach."""

Shown = Literal["worker", "stock", "none"]
"""Cache drafts that are looked up for a side: the worker's own, those that a stock server's limits
let through, or none."""


@dataclass(frozen=True, slots=True)
class Side:
    """One that may decide.

    What its like would not do it does not pay for: the router's work where it is shown nothing, and
    where it is shown the stock drafts their description.
    """

    name: str
    policy: Policy
    shown: Shown = "worker"

    @property
    def drafts(self) -> bool:
        """Whether it may ask the model drafter for anything."""
        return self.policy.use_model


def _rule(name: str, threshold: float, shown: Shown, model: bool) -> Side:
    policy = Policy("", 0, threshold, "frequency", use_model=model, role="", schema_id=SCHEMA_ID)
    return Side(name, policy, shown)


STOCK: Final = {
    PLAIN: _rule(PLAIN, _NEVER, "none", model=False),
    SUFFIX: _rule(SUFFIX, 0.0, "stock", model=False),
    MODEL: _rule(MODEL, _NEVER, "none", model=True),
}
"""Rules that learn nothing: no draft, every cache draft whole, a model draft of the configured
length in every cycle."""
