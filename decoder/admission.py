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

from decoder.complaints import Complaints
from decoder.contracts.bundle import ANY_SCOPE, CHAMPION, FIRST, LEAP, ROLES, TRIAL, Policy
from decoder.contracts.errors import PolicyRefused
from decoder.policy.probes import from_bytes

log = logging.getLogger(__name__)

MOST_WEIGHTS: Final = 1 << 18
"""Of a policy's network. One of 130 thousand takes 0.9 ms on a server core to choose for 64
requests, where those of this project, of 9 and 82 thousand, take 0.2 and 0.4: what takes more than
two would cost more than its drafts bring."""


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
    """Refuse what would take long to choose by, whoever else is busy on this machine.

    Raises:
        PolicyRefused: ``slow``: its network has more than ``MOST_WEIGHTS``.
    """
    weights = sum(part.size for layer in policy.layers for part in layer)
    if weights > MOST_WEIGHTS:
        raise PolicyRefused(
            "slow",
            f"policy with a network of {weights} weights, {MOST_WEIGHTS} are allowed: make its "
            "network smaller",
        )
