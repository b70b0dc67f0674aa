"""What cache drafts paid before: in this request, for this tenant, and in like contexts.

Everything here is updated as labels resolve, so it adapts within one request, long before any
retraining, and holds nothing that was not known when the next draft is judged. A tenant's memory is
its own, bounded, and keeps hashes, no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log1p
from typing import Final

from decoder.contracts.features import MEMORY_KEYS, RECENT

SLOTS: Final = 1 << 14
"""Entries of a tenant's memory for each key; a newcomer takes over the slot it falls into."""
FADE: Final = 0.8
"""Weight of an entry's past at each new payoff: about five are remembered."""
PRIOR_LOG: Final = 0.7
PRIOR_SHARE: Final = 0.3
PRIOR_FIRST: Final = 0.5
"""What an average draft does: log1p(payoff), payoff / length, first token accepted."""
FAST, SLOW, FIRST, TENANT, MODEL_FADE = 0.3, 0.05, 0.1, 0.002, 0.1
RECENT_CYCLES: Final = 16
"""Cycles over which the cache-selection rate is taken."""
_ALL_CYCLES: Final = (1 << RECENT_CYCLES) - 1

Keys = tuple[int, ...]
Entry = tuple[int, float, float, float, tuple[float, float, float]]
"""Key, weight, decayed sums of log payoff and share, and the features made of them: what can be
computed when a label resolves is not computed when a draft waits."""
_NEW: Final[Entry] = (0, 0.0, 0.0, 0.0, (PRIOR_LOG, PRIOR_SHARE, 0.0))


@dataclass(slots=True)
class TenantMemory:
    """Payoffs of one tenant: an average, and entries by the hash of context and draft."""

    first: float = PRIOR_FIRST
    log_payoff: float = PRIOR_LOG
    _tables: tuple[dict[int, Entry], ...] = field(
        default_factory=lambda: tuple({} for _ in MEMORY_KEYS)
    )

    def recall(self, keys: Keys) -> tuple[float, ...]:
        """Mean log payoff, mean share and log weight for each of ``keys``, flat."""
        flat: tuple[float, ...] = ()
        for key, table in zip(keys, self._tables, strict=True):
            entry = table.get(key % SLOTS, _NEW)
            flat += entry[4] if entry[0] == key else _NEW[4]
        return flat

    def learn(self, keys: Keys, accepted: int, length: int) -> None:
        """Take in a resolved payoff, in tokens, of a draft of ``length``. Mutates."""
        value, share = log1p(accepted), accepted / length
        self.first += TENANT * ((accepted > 0) - self.first)
        self.log_payoff += TENANT * (value - self.log_payoff)
        for key, table in zip(keys, self._tables, strict=True):
            entry = table.get(key % SLOTS, _NEW)
            _, weight, logs, shares, _ = entry if entry[0] == key else _NEW
            weight, logs, shares = weight * FADE + 1.0, logs * FADE + value, shares * FADE + share
            whole = weight + 1.0
            found = (logs + PRIOR_LOG) / whole, (shares + PRIOR_SHARE) / whole, log1p(weight)
            table[key % SLOTS] = key, weight, logs, shares, found


def memory_keys(context: Sequence[int], draft: Sequence[int]) -> Keys:
    """Keys of ``draft`` token ids after ``context``, its last token ids.

    The order is that of ``MEMORY_KEYS``. Hashes of integers are the same in every process.
    """
    last = context[-1] if context else -1
    return hash(tuple(draft[:8])), hash(tuple(context[-2:])), hash((last, draft[0]))


@dataclass(slots=True)
class History:
    """What a request has shown so far. Holds only labels already resolved: no leak."""

    payoffs: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    payoff_features: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Last, second last, third last, mean and maximum of ``payoffs``."""
    cache_share: float = 0.0
    first: float = PRIOR_FIRST
    fast: float = PRIOR_LOG
    slow: float = PRIOR_LOG
    broke_at: int = 0  # output tokens committed when a draft last broke off
    model: float = 1.0
    _arms: int = 0  # a bit for each of the last cycles, the newest lowest
    _cycles: int = 0  # that it tells of

    def took(self, cache: bool) -> None:
        """Take in whether a cycle verifies a cache draft. Mutates."""
        self._arms = (self._arms << 1 | cache) & _ALL_CYCLES
        self._cycles = min(self._cycles + 1, RECENT_CYCLES)
        self.cache_share = self._arms.bit_count() / self._cycles

    def learn(self, accepted: int, length: int, generated: int) -> None:
        """Take in a resolved payoff of a draft of ``length``, known after ``generated`` tokens."""
        payoffs = self.payoffs
        payoffs.append(accepted)
        count = len(payoffs)
        before = payoffs[-2] if count > 1 else 0
        earlier = payoffs[-3] if count > 2 else 0
        self.payoff_features = accepted, before, earlier, sum(payoffs) / count, max(payoffs)
        value = log1p(accepted)
        self.first += FIRST * ((accepted > 0) - self.first)
        self.fast += FAST * (value - self.fast)
        self.slow += SLOW * (value - self.slow)
        if accepted < length:
            self.broke_at = generated

    def learn_model(self, accepted: float) -> None:
        """Take in what the target accepts of a model draft of full length. Mutates."""
        self.model += MODEL_FADE * (accepted - self.model)
