"""The learner's scopes: the most recently used in memory, the others in the store.

Scope names come from the topic, where anybody may invent them, so both numbers are bounded.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from safetensors import SafetensorError

from decoder.contracts.bundle import FIRST, Policy, frequency_policy
from decoder.contracts.errors import ContractError
from decoder.policy.first import first_or_counting
from learner.checkpoint import Store
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.training.rows import Rows, empty, joined

log = logging.getLogger(__name__)

PART: Final = 512
"""Rows stored together: a save rewrites the last part of a buffer, and writes new ones."""
MAX_SCOPES: Final = 1_000  # each takes some megabytes


def initial_policy(name: str, settings: LearnerSettings) -> Policy:
    """The policy that scope ``name`` starts with, and falls back to."""
    if settings.start == "counting":
        return replace(frequency_policy(name), role=FIRST)
    return first_or_counting(name)


class Scopes:
    """Scopes by name, created or loaded on demand; ``loaded`` holds those in memory.

    ``events`` counts draft events by scope, the most recently used last. ``lost`` counts events
    that are not learned from, by scope and reason: ``fault`` (unsaved when a record failed),
    ``disk`` (never stored), ``damaged`` (in the store), ``side`` (drafts within limits other than
    the worker's own).
    """

    def __init__(
        self,
        settings: LearnerSettings,
        events: Mapping[str, int] = {},
        lost: Mapping[str, Mapping[str, int]] = {},
        store: Store | None = None,
    ) -> None:
        self.store = store or Store(settings.store_path)
        self.loaded: OrderedDict[str, Scope] = OrderedDict()
        self.events = OrderedDict(events)
        self.lost = {name: Counter(reasons) for name, reasons in lost.items()}
        self._settings = settings
        self._changed: set[str] = set()
        self._stored: dict[str, int] = {}  # rows, by loaded scope

    def get(self, name: str, events: int = 0) -> Scope:
        """Load or create scope ``name`` for a change, and count its ``events``."""
        if name not in self.loaded:
            if len(self.loaded) >= self._settings.awake_scopes:
                self._evict(next(iter(self.loaded)))
            self.loaded[name] = self._load(name)
        self.loaded.move_to_end(name)
        self.events[name] = self.events.get(name, 0) + events
        self.events.move_to_end(name)
        if len(self.events) > MAX_SCOPES:
            oldest, _ = self.events.popitem(last=False)
            self.lost.pop(oldest, None)
            self._delete(oldest)
        self._changed.add(name)
        return self.loaded[name]

    def count_lost(self, name: str, reason: str, events: int) -> None:
        """Count events of ``name`` that are not learned from."""
        if events > 0:
            self.lost.setdefault(name, Counter())[reason] += events

    def discard(self, name: str, reason: str) -> None:
        """Discard unsaved changes of ``name``, which are unreliable."""
        if self.loaded.pop(name, None) is not None:
            self._count_unstored(name, reason)
        self._changed.discard(name)

    def save(self) -> int:
        """Write changes into the store's transaction; the bytes.

        Raises:
            OSError: the disk refuses.
        """
        return sum(self._put(name) for name in sorted(self._changed & self.loaded.keys()))

    def commit(self) -> None:
        """Commit the transaction; raises OSError."""
        self.store.commit()
        self._changed.clear()

    def rollback(self) -> None:
        """Undo all writes since the last commit, also of evicted scopes."""
        self._changed |= self.loaded.keys()
        self._stored.clear()
        self.store.rollback()

    def _evict(self, name: str) -> None:
        try:
            if name in self._changed:
                self._put(name)
        except OSError as error:
            log.error("scope %s: lost what it learned since the last checkpoint: %s", name, error)
            self.rollback()  # a part of it must not be committed
        self.discard(name, "disk")

    def _put(self, name: str) -> int:
        """Write the scope, and rows added since the last write; the bytes."""
        scope, buffer = self.loaded[name], self.loaded[name].buffer
        oldest = buffer.total - len(buffer)
        written = self.store.put(f"scope {name}", scope.snapshot(), learned=self._learned(name))
        first = max(self._stored.get(name, 0) // PART * PART, oldest)
        rows = buffer.recent(buffer.total - first)
        for part in range(first // PART, -(-buffer.total // PART)):
            begin, end = (max(n * PART - first, 0) for n in (part, part + 1))
            written += self.store.put(f"rows {name}", vars(rows.part(begin, end)), part)
        self.store.drop(f"rows {name}", below=oldest // PART)
        self._stored[name] = buffer.total
        return written

    def _delete(self, name: str) -> None:
        with suppress(OSError):  # leftovers are overwritten, or never read
            for kind in ("scope", "rows"):
                self.store.drop(f"{kind} {name}")

    def _learned(self, name: str) -> int:
        """Events of ``name`` that are not known to be lost."""
        return self.events.get(name, 0) - sum(self.lost.get(name, {}).values())

    def _count_unstored(self, name: str, reason: str) -> None:
        """Count events of ``name`` that are neither stored nor known to be lost."""
        try:
            stored = self.store.learned(f"scope {name}")
        except OSError:  # the disk is why they are lost
            stored = 0
        self.count_lost(name, reason, self._learned(name) - stored)

    def _load(self, name: str) -> Scope:
        self._count_unstored(name, "disk")  # a commit may have failed since its eviction
        self._stored[name] = 0
        if name not in self.events:
            self._delete(name)  # forgotten long ago
        try:
            for tree in self.store.get(f"scope {name}"):
                parts = self.store.get(f"rows {name}", below=-(-int(tree["fed"]) // PART))
                rows = joined([empty(), *(Rows(**part) for part in parts)])
                scope = Scope.restore(name, self._settings, tree, rows)
                self._stored[name] = scope.buffer.total
                return scope
        except _UNREADABLE as error:
            log.error(
                "scope %s: its stored state is damaged or of another release (%r): learning anew; "
                "the served policy stays", name, error,
            )  # fmt: skip
            self._delete(name)
            self.count_lost(name, "damaged", self._learned(name))
        return Scope(name, self._settings, initial_policy(name, self._settings))


_UNREADABLE: Final[tuple[type[Exception], ...]] = (
    OSError, SafetensorError, ContractError, KeyError, ValueError, TypeError, IndexError,
)  # fmt: skip
