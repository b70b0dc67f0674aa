"""A request whose trace is followed: what is added up of it for the span that is made at its end.

Only requests that came with a trace, and only while spans are sent, cost anything here.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from decoder.contracts.bundle import Policy

KEY: Final = "hvd_trace"
"""Of ``vllm_xargs``: the trace of the request, as the header ``traceparent`` names it."""
_PARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def parent_of(given: Any) -> str:
    """``given`` if it is a ``traceparent`` (W3C Trace Context, 3.2), else ""."""
    return given if isinstance(given, str) and _PARENT.fullmatch(given) else ""


@dataclass(slots=True)
class Traced:
    """Sums over a request's cycles, by the arm that was verified; of the last one, the policy.

    ``began`` is in seconds since the epoch, ``decided_us`` what choosing took in its steps.
    """

    began: float
    cycles: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    decided_us: float = 0.0
    version: int = 0
    publication: int = 0

    def add(
        self, arm: str, verified: int, accepted: int, draft_us: float, policy: Policy | None
    ) -> None:
        """Add a cycle that verified ``verified`` draft tokens of ``arm``, as ``policy`` chose."""
        self.cycles[arm] += 1
        self.drafted[arm] += verified
        self.accepted[arm] += accepted
        self.decided_us += draft_us
        if policy is not None:
            self.version, self.publication = policy.version, policy.publication


class Ended(NamedTuple):
    """A request that ended ``at``, in seconds since the epoch.

    ``parent`` is the ``traceparent`` that it came with, ``request`` its pseudonym.
    """

    parent: str
    request: str
    choice: int
    traced: Traced
    at: float
    reason: str
