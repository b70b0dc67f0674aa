"""The variants that an experiment compares: each is a policy, and the cache drafts it may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from decoder.contracts.bundle import Policy
from decoder.contracts.features import SCHEMA_ID
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX

OUTSIDE: Final = "outside"
"""The name under which steps outside every block are summed."""
_NEVER: Final = 1e9
"""A threshold that no draft reaches, in accepted tokens."""

DraftSource = Literal["worker", "stock", "none"]
"""Which cache drafts a variant sees: all of the worker's, those within a stock server's limits, or
none."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One contender that may decide a block of steps.

    A variant does not pay for work that its counterpart in a stock server would not do: ``none``
    skips the look-ups, and ``stock`` is not charged for computing features.
    """

    name: str
    policy: Policy
    draft_source: DraftSource = "worker"


def _fixed_rule(name: str, threshold: float, source: DraftSource, use_model: bool) -> Variant:
    policy = Policy(
        "", 0, threshold, "frequency", use_model=use_model, role="", schema_id=SCHEMA_ID
    )
    return Variant(name, policy, source)


STOCK: Final = {
    PLAIN: _fixed_rule(PLAIN, _NEVER, "none", use_model=False),
    SUFFIX: _fixed_rule(SUFFIX, 0.0, "stock", use_model=False),
    MODEL: _fixed_rule(MODEL, _NEVER, "none", use_model=True),
}
"""Fixed rules: no draft, every cache draft in full, a model draft of the configured length in every
cycle."""
