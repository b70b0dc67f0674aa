"""Admission of policy bundles in a worker: validate, then swap; the last good policy stays.

A bundle that fails a check is refused, counted by reason and logged at most once a minute a reason;
the serving policy stays. A swap is one assignment between cycles: no request waits for it.
Admission asks whether a bundle is valid; the learner's gate asks whether it is better.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from decoder.contracts.bundle import ANY_SCOPE, CHAMPION, FIRST, LEAP, ROLES, TRIAL, Policy
from decoder.contracts.errors import PolicyRefused
from decoder.limited_log import LimitedLog
from decoder.policy.probes import from_bytes

log = logging.getLogger(__name__)

MAX_WEIGHTS: Final = 1 << 18
"""Weights of a policy's network. 130 thousand take 0.9 ms on a server core to choose for 64
requests; this project's networks, of 9 and 82 thousand, take 0.2 and 0.4 ms. More than 2 ms would
cost more than the drafts save."""


class Admission:
    """Serves the champion of one scope, or the first policy until there is one.

    ``held`` holds the last valid policy of each other role, which a trial compares with the
    champion. ``refusals`` counts refused bundles by reason. ``ignored`` counts skipped ones:
    ``older`` than the last accepted publication, a ``leap`` above it, an unknown ``role``, or for
    ``any`` scope where this scope has its own first policy.
    """

    def __init__(
        self, scope: str, apply: Callable[[Policy], None], current: Policy | None = None
    ) -> None:
        """Begin with ``current`` serving; ``apply`` swaps the policy that the router uses."""
        self._scope, self._apply = scope, apply
        self._accepted: dict[tuple[str, str], int] = {}  # last publication, by scope and role
        self.current = current
        self.held: dict[str, Policy] = {}
        self.applied_at = 0.0  # seconds since the epoch
        self.swaps = 0
        self.swap_ms_max = 0.0
        self.refusals: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self._limited_log = LimitedLog()

    def offer(self, data: bytes, role: str = CHAMPION) -> bool:
        """Validate ``data``, published for ``role``, then serve or hold it. Never raises.

        Returns:
            whether it serves, or is held, from now on.
        """
        began = time.perf_counter()
        if role not in ROLES:
            self.ignored["role"] += 1
            return False
        try:
            return self._accept(from_bytes(data, self._scope), role, began)
        except PolicyRefused as refused:
            self.refuse(refused)
        except Exception:  # noqa: BLE001 -- the feed thread must survive any bundle
            self.refusals["error"] += 1
            self._limited_log.exception("policy bundle refused, the serving policy stays")
        return False

    def refuse(self, refused: PolicyRefused) -> None:
        """Count and log a refused bundle."""
        self.refusals[refused.reason] += 1
        message = f"policy bundle refused ({refused.reason}), the serving policy stays: %s"
        self._limited_log.warning(message, refused)

    def end_trial(self) -> None:
        """Drop the policy on trial, if there is one."""
        if self.held.pop(TRIAL, None) is not None:
            log.info("the trial has ended")

    def _accept(self, policy: Policy, role: str, began: float) -> bool:
        if policy.role != role:
            raise PolicyRefused("role", f"policy of role {policy.role} published as {role}")
        if self._ignores(policy):
            return False
        check_size(policy)
        ours = replace(policy, scope=self._scope)
        if role == CHAMPION or (role == FIRST and self._lacks_champion()):
            self._serve(ours, began)
        else:
            log.info(
                "policy version %d (%s), publication %d, is held as %s",
                ours.version, ours.kind, ours.publication, role,
            )  # fmt: skip
        if role != CHAMPION:
            self.held[role] = ours
        self._accepted[policy.scope, role] = policy.publication
        return True

    def _ignores(self, policy: Policy) -> bool:
        last = self._accepted.get((policy.scope, policy.role), -1)
        if 0 < policy.publication <= last:
            self.ignored["older"] += policy.publication < last
            return True
        if policy.publication > max(last, 0) + LEAP:
            self.ignored["leap"] += 1
            return True
        general = policy.scope == ANY_SCOPE and (self._scope, policy.role) in self._accepted
        if general:
            self.ignored[ANY_SCOPE] += 1
        return general

    def _lacks_champion(self) -> bool:
        """Whether a first policy serves, or none."""
        return self.current is None or self.current.role == FIRST

    def _serve(self, policy: Policy, began: float) -> None:
        self._apply(policy)
        self.current = policy
        self.applied_at, self.swaps = time.time(), self.swaps + 1
        self.swap_ms_max = max(self.swap_ms_max, (time.perf_counter() - began) * 1e3)
        log.info(
            "policy version %d (%s), publication %d, now serves",
            policy.version, policy.kind, policy.publication,
        )  # fmt: skip


def check_size(policy: Policy) -> None:
    """Refuse a network too large to evaluate in time, whatever the machine's load.

    Raises:
        PolicyRefused: ``slow``: its network has more than ``MAX_WEIGHTS`` weights.
    """
    weights = sum(part.size for layer in policy.layers for part in layer)
    if weights > MAX_WEIGHTS:
        raise PolicyRefused(
            "slow",
            f"policy with a network of {weights} weights, at most {MAX_WEIGHTS} are allowed: make "
            "its network smaller",
        )
