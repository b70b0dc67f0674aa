"""Reader of the policy topic: the last publication of each scope and role."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from decoder.contracts.bundle import LEAP, NUMBERS_A_TERM, unpack
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.signature import is_genuine
from decoder.contracts.topics import POLICY, policy_key
from decoder.kafka.compacted import Compacted
from decoder.limited_log import LimitedLog

MAX_KEYS: Final = 100_000  # the most recently published: anybody may invent scopes


@dataclass(frozen=True)
class Publication:
    """A bundle on the topic, with its publication number; ``since`` is the first number read in a
    row for this version."""

    version: int
    number: int
    partition: int
    offset: int
    share: float = 0.0
    since: int = 0


class PolicyTopic:
    """Follows the policy topic on one thread; :meth:`last` and :meth:`term` are thread-safe.

    ``numbers`` has the highest number ever seen of each key: workers accept higher ones only, so a
    successor continues there. It starts with given numbers, which a recreated broker has lost but
    living workers have not.
    """

    def __init__(self, kafka: KafkaSettings, numbers: Mapping[bytes, int] = {}) -> None:
        self.numbers = OrderedDict(numbers)
        self._secret = kafka.policy_key
        self._limited_log = LimitedLog()
        self._last: dict[bytes, Publication] = {}
        self._topic = Compacted(kafka, POLICY, self._receive, self._retain)

    def read(self, seconds: float = 0.0) -> bool:
        """Read new records; see :meth:`decoder.kafka.compacted.Compacted.read`."""
        return self._topic.read(seconds)

    def last(self, scope: str, role: str = "champion") -> Publication | None:
        """What a starting worker would find; None if nothing valid."""
        return self._last.get(policy_key(scope, role))

    def term(self, scope: str, role: str = "champion") -> int:
        """The latest term under which anything was published."""
        return self.numbers.get(policy_key(scope, role), 0) // NUMBERS_A_TERM

    def close(self) -> None:
        """Disconnect."""
        self._topic.close()

    def _receive(self, record: Any) -> None:
        key = record.key or b""
        before = self._last.get(key)
        publication = self._parse(record, key, before)
        if publication is not None:
            self._last[key] = publication
        elif before is not None and before.partition == record.partition:
            # in another partition, only a higher number replaces it
            self._last.pop(key, None)

    def _parse(self, record: Any, key: bytes, before: Publication | None) -> Publication | None:
        """The publication that workers accept, after ``before``; None for an invalid record."""
        if not is_genuine(self._secret, record):
            return None  # and its number does not count
        try:
            policy, _ = unpack(record.value or b"")
        except PolicyRefused:
            return None
        if key != policy_key(policy.scope, policy.role):
            return None
        number, highest = policy.publication, self.numbers.get(key, 0)
        if number > highest + LEAP:
            self._limited_log.warning(
                "%s has publication %d, far above the last one: skipped. Check who writes to the "
                "topic.", key.decode(), number,
            )  # fmt: skip
            return None
        self.numbers[key] = max(highest, number)
        self.numbers.move_to_end(key)
        if len(self.numbers) > MAX_KEYS:
            oldest, _ = self.numbers.popitem(last=False)
            self._last.pop(oldest, None)
        if number < highest:
            return None
        same = before is not None and before.version == policy.version
        since = before.since if before is not None and same else number
        return Publication(
            policy.version, number, record.partition, record.offset, policy.share, since
        )

    def _retain(self, partition: int, offsets: range) -> None:
        """Forget publications of ``partition`` outside ``offsets``."""
        self._last = {
            key: last
            for key, last in self._last.items()
            if last.partition != partition or last.offset in offsets
        }
