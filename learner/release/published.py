"""What lies on the policy topic: the last publication of each scope and role."""

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

KEYS: Final = 100_000
"""Scopes and roles that are followed, the ones published last: anybody may make scopes up."""


@dataclass(frozen=True)
class Publication:
    """A bundle on the topic; ``number`` is its publication's, and ``since`` the first one's of this
    version that was read in a row with it."""

    version: int
    number: int
    partition: int
    offset: int
    share: float = 0.0
    since: int = 0


class Published:
    """Follows the policy topic.

    ``numbers`` has the highest number ever seen of each key: no worker takes one that is not above
    the one it has, so a learner that stands in for another goes on from there. It begins with what
    is given, which a broker that was made anew has forgotten and a living worker has not.

    One thread reads; others may ask for :meth:`last` and :meth:`term` meanwhile.
    """

    def __init__(self, kafka: KafkaSettings, numbers: Mapping[bytes, int] = {}) -> None:
        self.numbers = OrderedDict(numbers)
        self._secret = kafka.policy_key
        self._limited_log = LimitedLog()
        self._last: dict[bytes, Publication] = {}
        self._log = Compacted(kafka, POLICY, self._saw, self._keep)

    def read(self, seconds: float = 0.0) -> bool:
        """Take what has come; see :meth:`decoder.kafka.compacted.Compacted.read`."""
        return self._log.read(seconds)

    def last(self, scope: str, role: str = "champion") -> Publication | None:
        """What a worker that begins now would find; None where it would find nothing sound."""
        return self._last.get(policy_key(scope, role))

    def term(self, scope: str, role: str = "champion") -> int:
        """The latest term under which anything was published."""
        return self.numbers.get(policy_key(scope, role), 0) // NUMBERS_A_TERM

    def close(self) -> None:
        """Leave the broker."""
        self._log.close()

    def _saw(self, record: Any) -> None:
        key = record.key or b""
        lain = self._last.get(key)
        lies = self._publication(record, key, lain)
        if lies is not None:
            self._last[key] = lies
        elif lain is not None and lain.partition == record.partition:
            # of another partition nothing takes its place but a higher number
            self._last.pop(key, None)

    def _publication(self, record: Any, key: bytes, lain: Publication | None) -> Publication | None:
        """What workers take of ``record``, behind what has ``lain`` there; None for nothing."""
        if not is_genuine(self._secret, record):
            return None  # its number counts for nothing, however high it is
        try:
            policy, _ = unpack(record.value or b"")
        except PolicyRefused:
            return None
        if key != policy_key(policy.scope, policy.role):
            return None
        highest = self.numbers.get(key, 0)
        if policy.publication > highest + LEAP:
            self._limited_log.warning(
                "%s has publication %d, which is nobody's count: it is passed over. See who writes "
                "to the topic.", key.decode(), policy.publication,
            )  # fmt: skip
            return None
        self.numbers[key] = max(highest, policy.publication)
        self.numbers.move_to_end(key)
        if len(self.numbers) > KEYS:
            forgotten, _ = self.numbers.popitem(last=False)
            self._last.pop(forgotten, None)
        if policy.publication < highest:
            return None
        same = lain is not None and lain.version == policy.version
        return Publication(
            policy.version, policy.publication, record.partition, record.offset, policy.share,
            lain.since if lain is not None and same else policy.publication,
        )  # fmt: skip

    def _keep(self, partition: int, offsets: range) -> None:
        """Forget what lay in ``partition`` elsewhere than at ``offsets``."""
        self._last = {
            key: lain
            for key, lain in self._last.items()
            if lain.partition != partition or lain.offset in offsets
        }
