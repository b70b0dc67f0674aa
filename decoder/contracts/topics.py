"""Names of the Kafka topics and what is promised about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from decoder.contracts.bundle import ANY_SCOPE, FIRST


@dataclass(frozen=True)
class Topic:
    """A topic with its key and its clean-up policy."""

    name: str
    key: str
    compacted: bool

    @property
    def cleanup(self) -> str:
        """Kafka's word for what becomes of old records."""
        return "compact" if self.compacted else "delete"


DRAFTS: Final = Topic("hvd.drafts.v2", key="worker", compacted=False)
DEAD: Final = Topic("hvd.drafts.v2.dead", key="worker", compacted=False)
POLICY: Final = Topic("hvd.policy.v2", key="scope/role", compacted=True)
STATUS: Final = Topic("hvd.status.v2", key="process", compacted=False)
LEASE: Final = Topic("hvd.lease.v2", key="scope", compacted=True)
TRIALS: Final = Topic("hvd.trials.v2", key="worker", compacted=False)
TOPICS: Final = (DRAFTS, DEAD, POLICY, STATUS, LEASE, TRIALS)


def policy_key(scope: str, role: str) -> bytes:
    """Key of the policies of ``scope`` and ``role``: compaction keeps the last of each."""
    return f"{scope}/{role}".encode()


def policy_role(key: bytes | None, scope: str) -> str | None:
    """The role in a record's key; None where the record is not for ``scope``.

    The first policy for any scope is for every scope.
    """
    if key == policy_key(ANY_SCOPE, FIRST):
        return FIRST
    prefix = f"{scope}/".encode()
    if key is None or not key.startswith(prefix):
        return None
    return key.removeprefix(prefix).decode(errors="replace")
