"""Names of the Kafka topics and what is promised about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Topic:
    """A topic with its key and its clean-up policy."""

    name: str
    key: str
    compacted: bool


DRAFTS: Final = Topic("hvd.drafts.v1", key="worker", compacted=False)
POLICY: Final = Topic("hvd.policy.v1", key="scope", compacted=True)
STATUS: Final = Topic("hvd.status.v1", key="process", compacted=False)
TOPICS: Final = (DRAFTS, POLICY, STATUS)
