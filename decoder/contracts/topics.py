"""The Kafka topics: names, keys and clean-up policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from decoder.contracts.bundle import ANY_SCOPE, FIRST
from decoder.contracts.features import SCHEMA_ID


@dataclass(frozen=True)
class Topic:
    """A topic, its record key and its clean-up policy; the name identifies the record schema."""

    name: str
    key: str
    compacted: bool
    has_features: bool = False

    @property
    def cleanup(self) -> str:
        """Kafka's ``cleanup.policy``."""
        return "compact" if self.compacted else "delete"

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """Headers of every record: its schema and, if it holds features, the feature schema."""
        features = [("schema_id", SCHEMA_ID.encode())] if self.has_features else []
        return [("schema", self.name.encode()), *features]


DRAFTS: Final = Topic("hvd.drafts.v2", key="worker", compacted=False, has_features=True)
DEAD: Final = Topic("hvd.drafts.v2.dead", key="worker", compacted=False)
LESSONS: Final = Topic("hvd.lessons.v2", key="scope", compacted=False, has_features=True)
POLICY: Final = Topic("hvd.policy.v2", key="scope/role", compacted=True, has_features=True)
STATUS: Final = Topic("hvd.status.v2", key="process", compacted=False)
LEASE: Final = Topic("hvd.lease.v2", key="scope", compacted=True)
TRIALS: Final = Topic("hvd.trials.v2", key="worker", compacted=False)
TOPICS: Final = (DRAFTS, DEAD, LESSONS, POLICY, STATUS, LEASE, TRIALS)


def policy_key(scope: str, role: str) -> bytes:
    """Record key of a policy; compaction keeps the last record of each key."""
    return f"{scope}/{role}".encode()


def policy_role(key: bytes | None, scope: str) -> str | None:
    """The role in a record's key; None if the record is not for ``scope``.

    The first policy of ``ANY_SCOPE`` is for every scope.
    """
    if key == policy_key(ANY_SCOPE, FIRST):
        return FIRST
    prefix = f"{scope}/".encode()
    if key is None or not key.startswith(prefix):
        return None
    return key.removeprefix(prefix).decode(errors="replace")
