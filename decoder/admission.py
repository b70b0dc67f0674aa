"""What a bundle must pass before it is in force in this worker, and what was in force before.

A bundle that fails any check is refused, counted by reason and logged, each reason at most once a
minute; what is in force stays in force. A swap is one assignment between cycles: no request waits
for it. Not to be taken for the learner's gate, which asks whether a candidate is better.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from decoder.complaints import Complaints
from decoder.contracts.bundle import ANY_SCOPE, CHAMPION, FIRST, LEAP, ROLES, TRIAL, Policy
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.core.choice import choose
from decoder.core.rate import START
from decoder.policy.first import first_policy
from decoder.policy.pricing import NOMINAL
from decoder.policy.probes import from_bytes

log = logging.getLogger(__name__)

BUDGET_US: Final = {1: 250.0, 64: 2_500.0}
"""Longest time of one choice, by the requests of the step. All that the router does in a step of 64
requests should take a millisecond, and the policies that ship with the project take a fifth of one
for it on a server core: what takes more than two and a half is not held up by a slow core, it is
too large, and would cost more than its drafts bring."""
REPEATS: Final = 7
"""Time is this thread's own, so that a busy machine refuses no good policy; what cold caches and
clocks still add to it, they hardly add seven times in a row."""
LIKE_FIRST: Final = 10.0
"""Times as long as the first policy: within that, a machine is slow and not a policy."""
DRAFT_LEN: Final = 64
MODEL_LEN: Final = 4


class Admission:
    """Applies champions of one scope through ``apply``, and first policies while there is nothing
    better; keeps what was in force, and the tally.

    ``held`` has the last good policy of each role but the champion's: what a trial compares with
    the champion. ``refusals`` counts bundles by reason, ``ignored`` those passed over: ``older``
    than the publication taken last, a ``leap`` above it, of a ``role`` unknown here, or for ``any``
    scope where this one has its own first policy.
    """

    def __init__(
        self, scope: str, apply: Callable[[Policy], None], current: Policy | None = None
    ) -> None:
        """Begin with ``current`` in force."""
        self._scope, self._apply = scope, apply
        self._taken: dict[tuple[str, str], int] = {}  # publication by the scope and role of its key
        self.current = current
        self.held: dict[str, Policy] = {}
        self.applied_at = 0.0  # seconds since the epoch
        self.swaps = 0
        self.swap_ms_max = 0.0
        self.refusals: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self._complaints = Complaints()

    def offer(self, data: bytes, role: str = CHAMPION) -> bool:
        """Check ``data``, published for ``role``, and put it in force or hold it. Never raises.

        Returns:
            whether it is in force, or held, from now on.
        """
        began = time.perf_counter()
        if role not in ROLES:
            self.ignored["role"] += 1
            return False
        try:
            return self._take(from_bytes(data, self._scope), role, began)
        except PolicyRefused as refused:
            self.refuse(refused)
        except Exception:  # noqa: BLE001 -- the thread that asks must live, whatever a bundle made us do
            self.refusals["error"] += 1
            self._complaints.exception("policy bundle refused, the one in force stays")
        return False

    def refuse(self, refused: PolicyRefused) -> None:
        """Count and say that a bundle was ``refused``."""
        self.refusals[refused.reason] += 1
        what = f"policy bundle refused ({refused.reason}), the one in force stays: %s"
        self._complaints.warning(what, refused)

    def end_trial(self) -> None:
        """Hold no policy on trial any more; without one nothing happens."""
        if self.held.pop(TRIAL, None) is not None:
            log.info("the trial has ended")

    def _take(self, policy: Policy, role: str, began: float) -> bool:
        if policy.role != role:
            raise PolicyRefused("role", f"policy of role {policy.role} published as {role}")
        if self._passes_over(policy):
            return False
        check_pace(policy)
        ours = replace(policy, scope=self._scope)
        if role == CHAMPION or (role == FIRST and self._has_nothing_better()):
            self._put_in_force(ours, began)
        else:
            log.info(
                "policy version %d (%s), publication %d, is held as %s",
                ours.version, ours.kind, ours.publication, role,
            )  # fmt: skip
        if role != CHAMPION:
            self.held[role] = ours
        self._taken[policy.scope, role] = policy.publication
        return True

    def _passes_over(self, policy: Policy) -> bool:
        known = self._taken.get((policy.scope, policy.role), -1)
        if 0 < policy.publication <= known:
            self.ignored["older"] += policy.publication < known
            return True
        if policy.publication > max(known, 0) + LEAP:
            self.ignored["leap"] += 1
            return True
        general = policy.scope == ANY_SCOPE and (self._scope, policy.role) in self._taken
        if general:
            self.ignored[ANY_SCOPE] += 1
        return general

    def _has_nothing_better(self) -> bool:
        """Whether a first policy is in force, or none."""
        return self.current is None or self.current.role == FIRST

    def _put_in_force(self, policy: Policy, began: float) -> None:
        self._apply(policy)
        self.current = policy
        self.applied_at, self.swaps = time.time(), self.swaps + 1
        self.swap_ms_max = max(self.swap_ms_max, (time.perf_counter() - began) * 1e3)
        log.info(
            "policy version %d (%s), publication %d, is in force",
            policy.version, policy.kind, policy.publication,
        )  # fmt: skip


def check_pace(policy: Policy) -> None:
    """Let ``policy`` choose for steps of each size of ``BUDGET_US``, as the router would.

    Where the cores are so slow or so busy that the first policy itself, asked right then, takes
    about as long, time says nothing about ``policy``.

    Raises:
        PolicyRefused: ``slow``: not one of ``REPEATS`` choices was made within the budget.
    """
    for requests, budget in BUDGET_US.items():
        best = _best_us(policy, requests, budget)
        if best > budget and best > LIKE_FIRST * _of_first_us(requests):
            raise PolicyRefused(
                "slow",
                f"policy takes {best:.0f} us to choose for {requests} requests, {budget:.0f} are "
                "allowed: make its network smaller",
            )


def _best_us(policy: Policy, requests: int, enough: float) -> float:
    """Shortest of ``REPEATS`` choices, or the first that took no longer than ``enough``."""
    best = np.inf
    for _ in range(REPEATS):
        best = min(best, _choice_us(policy, requests))
        if best <= enough:
            break
    return float(best)


def _of_first_us(requests: int) -> float:
    """The same of the first policy; 0 where that cannot be read."""
    try:
        return _best_us(first_policy(ANY_SCOPE), requests, 0.0)
    except PolicyRefused:
        return 0.0


def _choice_us(policy: Policy, requests: int) -> float:
    probes = policy.probe_inputs if len(policy.probe_inputs) else np.zeros((1, NUM_FEATURES))
    features = np.resize(probes, (requests, NUM_FEATURES)).astype(np.float32)
    features[:, FEATURES.index("draft_len")] = DRAFT_LEN
    owners = np.arange(requests)
    began = time.thread_time()
    choose(policy, features, owners, requests, requests, NOMINAL, START, MODEL_LEN)
    return (time.thread_time() - began) * 1e6
