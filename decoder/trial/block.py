"""The account of one block: a stretch of text that one side decides on.

A block is as long as its requests take to commit ``LENGTH`` tokens each, in the mean, and not so
many steps: a side that copies fast would else spend few of its steps where there is something to
copy, and all sides would be measured there where the champion is slow. For the same reason the step
that reaches beyond the end of the stretch counts for the part of its tokens that lie within.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from decoder.contracts.trials import MAX_GROUPS, Block, Group
from decoder.trial.sides import Side

LENGTH: Final = 16.0
"""Tokens of each request, in the mean, that a block takes in. Longer ones make fewer pairs of the
same steps; shorter ones are mostly beginnings."""
LEAD: Final = 4.0
"""Tokens of each before those, that it does not: what the requests have just been through (drafts
still matching, accepted lengths) is another side's doing."""

Name = tuple[str, str]
"""Tenant and workload."""
Groups = dict[Name, list[int]]
"""Tokens and requests of each."""


class Made(NamedTuple):
    """What a step came to. Microseconds.

    ``late_us``, of ``us``, is what reading late for the drafter took beyond what such a step takes.
    """

    tokens: int
    requests: tuple[str, ...]
    us: float
    cost_us: float
    late_us: float
    groups: Groups
    sessions: frozenset[str] = frozenset()  # of the requests, or their names where they have none
    foretold: int = 0  # of the tokens, by the requests' own text


@dataclass(slots=True)
class Account:
    """One side's block so far; ``at`` is the place reached, in tokens a request."""

    side: Side
    at: float = 0.0
    steps: int = 0  # all
    taken: int = 0  # those of which something was taken in
    tokens: float = 0.0
    us: float = 0.0
    cost_us: float = 0.0
    foretold: float = 0.0
    late_us: float = 0.0
    requests: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    groups: dict[Name, list[float]] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether the stretch is over."""
        return self.at >= LEAD + LENGTH

    def add(self, made: Made) -> float:
        """Take in a step; the part of it that counts. Mutates."""
        begins = self.at
        self.pass_by(made)
        inside = min(self.at, LEAD + LENGTH) - max(begins, LEAD)
        part = max(inside, 0.0) / (self.at - begins) if self.at > begins else 0.0
        if part:
            self.taken += 1
            self.tokens += part * made.tokens
            self.foretold += part * made.foretold
            self.us += part * made.us
            self.cost_us += part * made.cost_us
            self.requests.update(made.requests)
            self.sessions.update(made.sessions or made.requests)
            self._group(part, made)
        return part

    def pass_by(self, made: Made) -> None:
        """Leave behind what a step committed, and take in nothing of it. Mutates."""
        self.at += made.tokens / len(made.requests)
        self.steps += 1

    def owe(self, us: float) -> None:
        """Charge it with its part of reading that is done for drafts. Mutates."""
        self.late_us += us
        self.us += us
        self.cost_us += us

    def _group(self, part: float, made: Made) -> None:
        each = part * made.cost_us / len(made.requests)
        for name, (tokens, requests) in made.groups.items():
            key = name if name in self.groups or len(self.groups) < MAX_GROUPS - 1 else _REST
            sums = self.groups.setdefault(key, [0.0, 0.0])
            sums[0] += part * tokens
            sums[1] += each * requests

    def block(self) -> Block:
        """As it goes to the topic."""
        return Block(
            side=self.side.name, version=self.side.policy.version,
            publication=self.side.policy.publication, steps=self.taken,
            requests=len(self.requests), tokens=self.tokens, us=self.us, cost_us=self.cost_us,
            foretold=self.foretold, late_us=self.late_us,
            groups=tuple(
                Group(tenant=tenant, workload=workload, tokens=tokens, cost_us=us)
                for (tenant, workload), (tokens, us) in self.groups.items()
            ),
        )  # fmt: skip


@dataclass(slots=True)
class Sums:
    """What a side has been booked with since the worker started: the sum of its blocks."""

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

    def take(self, account: Account) -> None:
        """Add a block. Mutates."""
        self.add(account.taken, account.tokens, account.us, account.cost_us)


_REST: Final = ("", "")
"""The group of those for which there is no room."""
