"""Totals of one block: a window of text that one variant decides.

A block ends when its requests have committed ``WINDOW_TOKENS`` tokens each, on average. Blocks of a
fixed number of steps would give a variant that copies fast few steps where there is text to copy,
and all variants would be measured where the champion is slow. For the same reason, the step that
crosses the end of the window counts only for the tokens inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from decoder.contracts.trials import MAX_GROUPS, Block, Group
from decoder.experiment.variants import Variant

WINDOW_TOKENS: Final = 16.0
"""Mean tokens of each request that a block counts. Longer blocks make fewer pairs of the same
steps; shorter ones are mostly warm-up."""
WARMUP_TOKENS: Final = 4.0
"""Mean tokens of each request before those, which are not counted: their drafts and recent accepted
lengths still stem from another variant."""

GroupName = tuple[str, str]
"""Tenant and workload."""
Groups = dict[GroupName, list[int]]
"""Tokens and requests of each."""


class StepOutcome(NamedTuple):
    """What a step produced, and its time in microseconds.

    ``prefill_us``, part of ``us``, is the time of deferred drafter prefill beyond a usual step.
    """

    tokens: int
    requests: tuple[str, ...]
    us: float
    cost_us: float
    prefill_us: float
    groups: Groups
    sessions: frozenset[str] = frozenset()  # of the requests; the names of those without a session
    predictable: int = 0  # tokens predicted by the request's own text (a covariate)


@dataclass(slots=True)
class BlockTotals:
    """Running totals of one variant's block; ``position`` is in mean tokens a request."""

    variant: Variant
    position: float = 0.0
    steps: int = 0  # all
    counted_steps: int = 0  # with at least one token inside the window
    tokens: float = 0.0
    us: float = 0.0
    cost_us: float = 0.0
    predictable: float = 0.0
    prefill_us: float = 0.0
    requests: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    groups: dict[GroupName, list[float]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the window has ended."""
        return self.position >= WARMUP_TOKENS + WINDOW_TOKENS

    def add(self, step: StepOutcome) -> float:
        """Add a step; returns the fraction of it inside the window. Mutates."""
        begin = self.position
        self.skip(step)
        inside = min(self.position, WARMUP_TOKENS + WINDOW_TOKENS) - max(begin, WARMUP_TOKENS)
        fraction = max(inside, 0.0) / (self.position - begin) if self.position > begin else 0.0
        if fraction:
            self.counted_steps += 1
            self.tokens += fraction * step.tokens
            self.predictable += fraction * step.predictable
            self.us += fraction * step.us
            self.cost_us += fraction * step.cost_us
            self.requests.update(step.requests)
            self.sessions.update(step.sessions or step.requests)
            self._add_groups(fraction, step)
        return fraction

    def skip(self, step: StepOutcome) -> None:
        """Advance past a step without counting it. Mutates."""
        self.position += step.tokens / len(step.requests)
        self.steps += 1

    def charge_prefill(self, us: float) -> None:
        """Charge the block with its share of deferred drafter prefill. Mutates."""
        self.prefill_us += us
        self.us += us
        self.cost_us += us

    def _add_groups(self, fraction: float, step: StepOutcome) -> None:
        request_us = fraction * step.cost_us / len(step.requests)
        for name, (tokens, requests) in step.groups.items():
            fits = name in self.groups or len(self.groups) < MAX_GROUPS - 1
            totals = self.groups.setdefault(name if fits else _OTHERS, [0.0, 0.0])
            totals[0] += fraction * tokens
            totals[1] += request_us * requests

    def block(self) -> Block:
        """The block's record for the trials topic."""
        return Block(
            side=self.variant.name, version=self.variant.policy.version,
            publication=self.variant.policy.publication, steps=self.counted_steps,
            requests=len(self.requests), tokens=self.tokens, us=self.us, cost_us=self.cost_us,
            foretold=self.predictable, late_us=self.prefill_us,
            groups=tuple(
                Group(tenant=tenant, workload=workload, tokens=tokens, cost_us=us)
                for (tenant, workload), (tokens, us) in self.groups.items()
            ),
        )  # fmt: skip


@dataclass(slots=True)
class Totals:
    """A variant's sums over all blocks since the worker started."""

    steps: int = 0
    tokens: float = 0.0
    us: float = 0.0
    cost_us: float = 0.0

    def add(self, steps: int, tokens: float, us: float, cost_us: float) -> None:
        """Mutates."""
        self.steps += steps
        self.tokens += tokens
        self.us += us
        self.cost_us += cost_us

    def add_block(self, block: BlockTotals) -> None:
        """Mutates."""
        self.add(block.counted_steps, block.tokens, block.us, block.cost_us)


_OTHERS: Final = ("", "")
"""The group of tenants and workloads beyond ``MAX_GROUPS``."""
