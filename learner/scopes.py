"""The scopes a learner has heard of: some awake in memory, the rest in the store.

A scope's name comes from the topic, where anybody may make one up: so only ``awake`` of them are
held in memory, the ones heard of last, and ``KNOWN`` at all.
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
"""Rows of a buffer that are stored together: a save writes the last part anew, and those after."""
KNOWN: Final = 1_000
"""Scopes kept at all, each some megabytes."""


def beginning(name: str, settings: LearnerSettings) -> Policy:
    """What scope ``name`` begins with, and what contends whenever another policy is served."""
    if settings.start == "counting":
        return replace(frequency_policy(name), role=FIRST)
    return first_or_counting(name)


class Scopes:
    """Scopes by name, made when they are first asked for; ``awake`` holds those in memory.

    ``entries`` are the events that each has come to, with a draft or without, in the order in which
    they were last heard of. ``lost`` counts, of these, those whose lesson is gone, by scope and
    reason: ``fault`` (in memory beside a record that could not be learned from), ``disk`` (never
    stored), ``damaged`` (in the store), ``side`` (drafts within other limits than the worker's).
    """

    def __init__(
        self,
        settings: LearnerSettings,
        entries: Mapping[str, int] = {},
        lost: Mapping[str, Mapping[str, int]] = {},
        store: Store | None = None,
    ) -> None:
        self.store = store or Store(settings.store_path)
        self.awake: OrderedDict[str, Scope] = OrderedDict()
        self.entries = OrderedDict(entries)
        self.lost = {name: Counter(reasons) for name, reasons in lost.items()}
        self._settings = settings
        self._changed: set[str] = set()
        self._stored: dict[str, int] = {}  # rows, of those awake

    def of(self, name: str, events: int = 0) -> Scope:
        """The scope ``name``, woken or made, that has come to ``events`` more; to be changed."""
        if name not in self.awake:
            if len(self.awake) >= self._settings.awake_scopes:
                self._rest(next(iter(self.awake)))
            self.awake[name] = self._woken(name)
        self.awake.move_to_end(name)
        self.entries[name] = self.entries.get(name, 0) + events
        self.entries.move_to_end(name)
        if len(self.entries) > KNOWN:
            oldest, _ = self.entries.popitem(last=False)
            self.lost.pop(oldest, None)
            self._drop(oldest)
        self._changed.add(name)
        return self.awake[name]

    def pass_over(self, name: str, reason: str, events: int) -> None:
        """Of those that ``name`` has come to, so many are not learned from."""
        if events > 0:
            self.lost.setdefault(name, Counter())[reason] += events

    def abandon(self, name: str, reason: str) -> None:
        """Go back to what was stored of ``name`` last: what is in memory cannot be relied on."""
        if self.awake.pop(name, None) is not None:
            self._lose_unstored(name, reason)
        self._changed.discard(name)

    def save(self) -> int:
        """Put what has changed into the store; the bytes. It is in force when that is committed.

        Raises:
            OSError: the disk refuses.
        """
        return sum(self._put(name) for name in sorted(self._changed & self.awake.keys()))

    def commit(self) -> None:
        """Let what was put be in force.

        Raises:
            OSError: the disk refuses.
        """
        self.store.commit()
        self._changed.clear()

    def undo(self) -> None:
        """Undo what was put since the last commit, that of scopes which rest now included."""
        self._changed |= self.awake.keys()
        self._stored.clear()
        self.store.rollback()

    def _rest(self, name: str) -> None:
        try:
            if name in self._changed:
                self._put(name)
        except OSError as error:
            log.error(
                "scope %s: what it learned since the last checkpoint is lost: %s", name, error
            )
            self.undo()  # a part of it must not be in force
        self.abandon(name, "disk")

    def _put(self, name: str) -> int:
        """The scope without its rows, and those that came since; the bytes."""
        scope, buffer = self.awake[name], self.awake[name].buffer
        oldest = buffer.total - len(buffer)
        written = self.store.put(f"scope {name}", scope.snapshot(), learned=self._known(name))
        first = max(self._stored.get(name, 0) // PART * PART, oldest)
        rows = buffer.recent(buffer.total - first)
        for part in range(first // PART, -(-buffer.total // PART)):
            begin, end = (max(n * PART - first, 0) for n in (part, part + 1))
            written += self.store.put(f"rows {name}", vars(rows.part(begin, end)), part)
        self.store.drop(f"rows {name}", below=oldest // PART)
        self._stored[name] = buffer.total
        return written

    def _drop(self, name: str) -> None:
        with suppress(OSError):  # what stays of it is overwritten, or never read
            for kind in ("scope", "rows"):
                self.store.drop(f"{kind} {name}")

    def _known(self, name: str) -> int:
        """Events of ``name`` that are learned from for all that is known."""
        return self.entries.get(name, 0) - sum(self.lost.get(name, {}).values())

    def _lose_unstored(self, name: str, reason: str) -> None:
        """Count the events of ``name`` that are neither stored nor known to be lost."""
        try:
            learned = self.store.learned(f"scope {name}")
        except OSError:  # the disk is why it is lost
            learned = 0
        self.pass_over(name, reason, self._known(name) - learned)

    def _woken(self, name: str) -> Scope:
        self._lose_unstored(name, "disk")  # where a commit failed since it rests
        self._stored[name] = 0
        if name not in self.entries:
            self._drop(name)  # one that was forgotten long ago
        try:
            for tree in self.store.get(f"scope {name}"):
                parts = self.store.get(f"rows {name}", below=-(-int(tree["fed"]) // PART))
                rows = [Rows(**part) for part in parts]
                scope = Scope.restored(name, self._settings, tree, joined([empty(), *rows]))
                self._stored[name] = scope.buffer.total
                return scope
        except _UNUSABLE as error:
            log.error(
                "scope %s: what is stored of it is unusable, damaged or of another release (%r): "
                "it is learned anew, and what is served stays", name, error,
            )  # fmt: skip
            self._drop(name)
            self.pass_over(name, "damaged", self._known(name))
        return Scope(name, self._settings, beginning(name, self._settings))


_UNUSABLE: Final[tuple[type[Exception], ...]] = (
    OSError, SafetensorError, ContractError, KeyError, ValueError, TypeError, IndexError,
)  # fmt: skip
