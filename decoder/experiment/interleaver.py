"""Randomised interleaving: a worker assigns blocks of live decoding to variants.

The champion decides most of the text. Now and then there is a **round**: one block of each variant
that takes part and one of the champion, in random order, so that all of them meet the same traffic
and the same machine. The gap before the next round is drawn from an exponential distribution over
tokens of text. The distribution is memoryless: a round begins anywhere in the text with the same
probability, and not more often where decoding is slow.

Shares are shares of steps, since steps are what a comparison costs. The variants of the permanent
comparison divide one share and get equally many blocks; with equal steps, the slowest would be in
the fewest pairs. The variant that is due most often takes part in every round, the others in a
random subset.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL, Policy
from decoder.experiment.block import WARMUP_TOKENS, WINDOW_TOKENS, BlockTotals, StepOutcome, Totals
from decoder.experiment.variants import OUTSIDE, STOCK, Variant

MAX_PENDING_ROUNDS: Final = 256
"""Rounds that wait to be sent; the newest is dropped when there are as many."""
MAX_CLUSTER_ROUNDS: Final = 32
"""Rounds of one cluster, some six thousand tokens of a request at a share of 0.1. Without a limit,
a client that sends everything as one session would be a single pair for ever, and no trial of its
worker would end."""
SMOOTHING: Final = 1 / 16
"""Weight of the newest block in a variant's mean steps a block, and of the newest step in the
champion's mean tokens a step. Both set how often a round is due."""
MIN_BLOCK_RATE: Final = 1e-12
"""Blocks a step below which no round is ever due."""


class FinishedRound(NamedTuple):
    """A finished round: ``time`` in seconds since the epoch. ``cluster`` is the number of the round
    that began the cluster, which goes on for at most ``MAX_CLUSTER_ROUNDS`` while any of its
    sessions is still decoding."""

    number: int
    time: float
    blocks: tuple[BlockTotals, ...]
    cluster: int = 0


class Interleaver:
    """Assigns one worker's steps to variants. For the engine's thread; another thread empties
    ``rounds``.

    A round is cancelled when the champion or the policy on trial changes: its steps then count as
    outside.
    """

    def __init__(
        self,
        names: Sequence[str],
        holdout: float,
        policies: Mapping[str, Policy],
        first: Policy,
        seed: int | str,
        anchored: bool = True,
    ) -> None:
        """Begin outside of a round.

        Args:
            names: variants of the permanent comparison; ``holdout`` is their share of the steps.
            policies: policies by role, updated by their owner; ``first`` stands in where the first
                policy is missing.
            seed: of the random assignment.
            anchored: include the first policy in every trial of another policy over a champion.
        """
        self.rounds: deque[FinishedRound] = deque()
        self.rounds_made = self.rounds_dropped = 0
        self.number = -1
        """Of the last round that began; one that is cancelled keeps its own."""
        self._totals: dict[str, Totals] = {OUTSIDE: Totals()}
        self.failures: Counter[str] = Counter()
        self.comparing = False
        """Whether any variant is compared with the champion."""
        self._names, self._holdout = tuple(names) if holdout else (), holdout
        self._policies, self._first = policies, first
        self._random = random.Random(seed)
        self._disabled: dict[str, Policy] = {}  # policies that failed, by variant
        self._block_steps: dict[str, float] = {}  # mean steps a block, by variant
        self._step_tokens = 1.0  # mean tokens a request and step, outside of rounds
        self._gap = -1.0  # tokens of each request until the next round; below 0: to be drawn
        self._chances: dict[str, float] = {}  # of taking part in the next round
        self._serving: tuple[Policy | None, Policy | None] = (None, None)  # champion, trial
        self._anchored = anchored
        self._waiting: list[Variant] = []
        self._finished: list[BlockTotals] = []
        self._block: BlockTotals | None = None
        self._prefill_us = 0.0  # deferred drafter prefill in this round
        self._cluster, self._cluster_sessions = 0, set[str]()

    @property
    def totals(self) -> dict[str, Totals]:
        """Sums of finished rounds by variant; all other steps under ``OUTSIDE``. Open blocks are in
        neither. Empty where nothing is compared."""
        return dict(self._totals) if self._totals[OUTSIDE].tokens else {}

    @property
    def active(self) -> str:
        """Name of the variant that decides now; "" outside of a round."""
        return self._block.variant.name if self._block is not None else ""

    def next_variant(self, champion: Policy) -> Variant | None:
        """The variant that decides the next step; None for the champion outside of a round."""
        trial = self._policies.get(TRIAL)
        self.comparing = bool(self._names) or trial is not None
        if not self.comparing and self._block is None:
            return None
        if self._serving[0] is not champion or self._serving[1] is not trial:
            self._serving = champion, trial
            self._cancel()
        if self._gap < 0.0:
            self._draw_gap()
        if self._block is None and self._gap <= 0.0:
            self._begin_round()
        return self._block.variant if self._block is not None else None

    def record_step(self, variant: Variant | None, step: StepOutcome, counts: bool) -> None:
        """Record what a step of ``variant`` produced.

        Args:
            counts: False where the step also read prompts or its time is unknown. Such a step
                advances the block, and its tokens count as outside.
        """
        block, outside = self._block, self._totals[OUTSIDE]
        current = block is not None and variant is block.variant
        if not current or not counts:
            outside.add(1, step.tokens, step.us, step.cost_us)
        if block is None and step.tokens:
            tokens = step.tokens / len(step.requests)
            self._step_tokens += (tokens - self._step_tokens) * SMOOTHING
            self._gap = max(self._gap - tokens, 0.0)
        if block is None or not current:
            return
        if counts:
            self._count(block, step)
        else:
            block.skip(step)  # else a variant would decide for as long as prompts arrive
        if block.complete:
            self._end_block(block)

    def disable(self, variant: Variant) -> None:
        """Exclude ``variant`` until it has another policy."""
        self._disabled[variant.name] = variant.policy
        self.failures[variant.name] += 1
        self._cancel()

    def _count(self, block: BlockTotals, step: StepOutcome) -> None:
        """Add the step to the block, and the part beyond its end to the steps outside."""
        self._prefill_us += step.prefill_us
        step = step._replace(us=max(step.us - step.prefill_us, 0.0))
        beyond = 1.0 - block.add(step)
        if beyond:
            outside = (beyond * n for n in (step.tokens, step.us, step.cost_us))
            self._totals[OUTSIDE].add(0, *outside)

    def _eligible(self) -> dict[str, tuple[Variant, float]]:
        """Variants that may take part, each with the share of steps that a trial gives it."""
        champion, trial = self._serving
        assert champion is not None, "called before a step"
        first = self._policies.get(FIRST, self._first)
        eligible = {name: (STOCK.get(name) or Variant(FIRST, first), 0.0) for name in self._names}
        if trial is not None and trial.share > 0.0:
            eligible[TRIAL] = Variant(TRIAL, trial), trial.share
            differs = FIRST in eligible or champion.digest != first.digest
            if self._anchored and differs and self._disabled.get(TRIAL) is not trial:
                eligible[FIRST] = Variant(FIRST, first), trial.share
        return {n: v for n, v in eligible.items() if self._disabled.get(n) is not v[0].policy}

    def _draw_gap(self) -> None:
        """Draw the gap before the next round, and set each variant's chance of taking part."""
        eligible = self._eligible()
        default = WARMUP_TOKENS + WINDOW_TOKENS
        steps = {name: self._block_steps.get(name, default) for name in (*eligible, CHAMPION)}
        permanent = [name for name in self._names if name in eligible]
        rate = self._holdout / max(sum(steps[n] for n in permanent), 1.0)
        rates = dict.fromkeys(permanent, rate)  # blocks a step
        for name, (_, share) in eligible.items():
            rates[name] = max(rates.get(name, 0.0), share / steps[name])
        highest = max(rates.values(), default=0.0)
        if highest < MIN_BLOCK_RATE:
            self._gap = float("inf")
            return
        self._chances = {name: rate / highest for name, rate in rates.items()}
        round_steps = steps[CHAMPION] + sum(c * steps[n] for n, c in self._chances.items())
        mean = max(1.0 / highest - round_steps, 0.0) * self._step_tokens
        self._gap = self._random.expovariate(1.0 / mean) if mean else 0.0

    def _begin_round(self) -> None:
        champion = self._serving[0]
        assert champion is not None
        variants = [
            variant for name, (variant, _) in self._eligible().items()
            if self._random.random() < self._chances.get(name, 0.0)
        ]  # fmt: skip
        if not variants:
            self._gap = -1.0
            return
        self.number += 1
        variants.append(Variant(CHAMPION, champion))
        self._random.shuffle(variants)
        self._waiting, self._finished, self._prefill_us = variants, [], 0.0
        self._block = BlockTotals(self._waiting.pop(0))

    def _end_block(self, block: BlockTotals) -> None:
        """Close a block, and the round with its last block."""
        name = block.variant.name
        mean = self._block_steps.setdefault(name, float(block.steps))
        self._block_steps[name] = mean + (block.steps - mean) * SMOOTHING
        self._finished.append(block)
        self._block = BlockTotals(self._waiting.pop(0)) if self._waiting else None
        if self._block is None:
            self._end_round()

    def _end_round(self) -> None:
        # Blocks are equally long: a variant that drafts pays for the prefill of its own text, and
        # for no other's, whenever that prefill ran.
        window = WINDOW_TOKENS / (WARMUP_TOKENS + WINDOW_TOKENS)
        each = self._prefill_us / len(self._finished) * window
        for block in self._finished:
            block.charge_prefill(each * block.variant.policy.use_model)
            self._prefill_us -= each * block.variant.policy.use_model
        sessions = set[str]().union(*(block.sessions for block in self._finished))
        full = self.number - self._cluster >= MAX_CLUSTER_ROUNDS
        if full or sessions.isdisjoint(self._cluster_sessions):
            self._cluster, self._cluster_sessions = self.number, sessions
        if len(self.rounds) < MAX_PENDING_ROUNDS:
            blocks = tuple(self._finished)
            self.rounds.append(FinishedRound(self.number, time.time(), blocks, self._cluster))
        else:
            self.rounds_dropped += 1
        self.rounds_made += 1
        for block in self._finished:
            self._totals.setdefault(block.variant.name, Totals()).add_block(block)
        self._finished = []
        self._cancel()

    def _cancel(self) -> None:
        """Leave the round; its open blocks count as outside."""
        for block in (*self._finished, *([self._block] if self._block is not None else [])):
            self._totals[OUTSIDE].add_block(block)
        self._totals[OUTSIDE].add(0, 0.0, self._prefill_us, self._prefill_us)
        self._block, self._waiting, self._finished = None, [], []
        self._gap, self._prefill_us = -1.0, 0.0
