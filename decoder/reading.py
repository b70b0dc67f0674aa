"""Whether the model drafter reads a request's prompt: only where that pays.

A drafter can draft for a request only behind what it has read of it, and reading a prompt takes it
time whether or not it ever drafts. What that brings is foreseen from the steps before: what model
drafts add to a step of this batch, by the prices in force (:attr:`decoder.choice.Chosen.worth`),
for as many steps as requests took lately. A request that is passed over has no model drafts to its
end. One in :data:`LOOK_EVERY` of those is read all the same, so that what is known of the drafter
does not grow old.
"""

from __future__ import annotations

from typing import Final

from decoder.policy.pricing import CostTable

LOOK_EVERY: Final = 16
"""Requests that would be passed over, of which one is read: a sixteenth of what reading all costs.
"""
STEPS: Final = 1 / 32
"""Weight of one step in what model drafts add: a batch that has changed is known some dozens of
steps later, which is what a request takes."""
REQUESTS: Final = 1 / 8
"""Weight of one request in how many steps they take."""


class Reading:
    """What one worker knows of the worth of reading. Written and read by the engine's thread."""

    def __init__(self) -> None:
        self.worth_us = 0.0
        """What model drafts would add to a step, for each of its requests."""
        self.steps = 0.0
        """Steps that a request takes."""
        self._passed = 0  # requests, since one of them was read

    def observe(self, worth_us: float, requests: int) -> None:
        """Take in what model drafts would add to a step of so many requests. Mutates."""
        self.worth_us += (worth_us / requests - self.worth_us) * STEPS

    def ended(self, steps: int) -> None:
        """Take in a request that took so many steps. Mutates."""
        self.steps += (steps - self.steps) * (REQUESTS if self.steps else 1.0)

    def reads(self, tokens: int, costs: CostTable) -> bool:
        """Whether the drafter reads a request of which it has so many tokens to read. Mutates.

        It does where nothing is known of the time that takes, and until a request has ended.
        """
        if not self.steps or tokens * costs.read_us <= self.worth_us * self.steps:
            return True
        self._passed += 1
        if self._passed < LOOK_EVERY:
            return False
        self._passed = 0
        return True
