"""What a bundle must pass before it is in force in this worker, and what was in force before.

A bundle that fails any check is refused, counted by reason and logged; what is in force stays in
force. A swap is one assignment between cycles: no request waits for it. Not to be taken for the
learner's gate, which asks whether a candidate is better.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from decoder.choice import choose
from decoder.contracts.bundle import ROLES, Policy
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.policy.pricing import NOMINAL
from decoder.policy.probes import from_bytes
from decoder.rate import START

log = logging.getLogger(__name__)

BUDGET_US: Final = {1: 250.0, 64: 2_500.0}
"""Longest time of one choice, by the requests of the step. All that the router does in a step of 64
requests should take a millisecond, and the policies that ship with the project take a fifth of one
for it on a server core: what takes more than two and a half is not held up by a slow core, it is
too large, and would cost more than its drafts bring."""
REPEATS: Final = 7
"""Time is this thread's own, so that a busy machine refuses no good policy; what cold caches and
clocks still add to it, they hardly add seven times in a row."""
DRAFT_LEN: Final = 64
MODEL_LEN: Final = 4

CHAMPION, *_OTHERS = ROLES


class Admission:
    """Applies champions of one scope through ``apply``; keeps what was in force, and the tally.

    ``held`` has the last good policy of each other role, for later use. ``refusals`` counts bundles
    by reason, ``ignored`` those passed over: ``older`` than the publication in force, or of a
    ``role`` unknown here.
    """

    def __init__(self, scope: str, apply: Callable[[Policy], None]) -> None:
        self._scope, self._apply = scope, apply
        self.current: Policy | None = None
        self.previous: Policy | None = None
        self.held: dict[str, Policy] = {}
        self.applied_at = 0.0  # seconds since the epoch
        self.swaps = 0
        self.swap_ms_max = 0.0
        self.refusals: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()

    def offer(self, data: bytes, role: str = CHAMPION) -> bool:
        """Check ``data``, published for ``role``, and put a champion in force. Never raises.

        Returns:
            whether it is in force, or held, from now on.
        """
        began = time.perf_counter()
        if role not in ROLES:
            self.ignored["role"] += 1
            return False
        try:
            policy = from_bytes(data, self._scope)
            if policy.role != role:
                raise PolicyRefused("role", f"policy of role {policy.role} published as {role}")
            ahead = self._ahead(policy)
            if ahead >= 0 and policy.publication:
                self.ignored["older"] += ahead > 0
                return False
            check_pace(policy)
            if role != CHAMPION:
                self.held[role] = policy
                return True
            self._apply(policy)
        except PolicyRefused as refused:
            self.refusals[refused.reason] += 1
            log.warning("policy bundle refused, the one in force stays: %s", refused)
            return False
        except Exception:  # the thread that asks must live, whatever a bundle made us do
            self.refusals["error"] += 1
            log.exception("policy bundle refused, the one in force stays")
            return False
        self.previous, self.current = self.current, policy
        self.applied_at, self.swaps = time.time(), self.swaps + 1
        self.swap_ms_max = max(self.swap_ms_max, (time.perf_counter() - began) * 1e3)
        log.info(
            "policy version %d (%s), publication %d, is in force",
            policy.version, policy.kind, policy.publication,
        )  # fmt: skip
        return True

    def _ahead(self, policy: Policy) -> int:
        """How many publications the one taken last for its role is ahead of ``policy``."""
        known = self.current if policy.role == CHAMPION else self.held.get(policy.role)
        return known.publication - policy.publication if known is not None else -1


def check_pace(policy: Policy) -> None:
    """Let ``policy`` choose for steps of each size of ``BUDGET_US``, as the router would.

    Raises:
        PolicyRefused: ``slow``: not one of ``REPEATS`` choices was made within the budget.
    """
    for requests, budget in BUDGET_US.items():
        best = np.inf
        for _ in range(REPEATS):
            best = min(best, _choice_us(policy, requests))
            if best <= budget:
                break
        else:
            raise PolicyRefused(
                "slow",
                f"policy takes {best:.0f} us to choose for {requests} requests, {budget:.0f} are "
                "allowed: make its network smaller",
            )


def _choice_us(policy: Policy, requests: int) -> float:
    probes = policy.probe_inputs if len(policy.probe_inputs) else np.zeros((1, NUM_FEATURES))
    features = np.resize(probes, (requests, NUM_FEATURES)).astype(np.float32)
    features[:, FEATURES.index("draft_len")] = DRAFT_LEN
    owners = np.arange(requests)
    began = time.thread_time()
    choose(policy, features, owners, requests, requests, NOMINAL, START, MODEL_LEN)
    return (time.thread_time() - began) * 1e6
