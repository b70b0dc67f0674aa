"""The scopes a learner has heard of: some awake in memory, the rest lying in their files.

A scope's name comes from the topic, where anybody may make one up: so only ``awake`` of them are
held in memory, the ones heard of last, and ``KNOWN`` at all.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from safetensors import SafetensorError

from decoder.contracts.bundle import FIRST, Policy, frequency_policy
from decoder.contracts.errors import ContractError
from decoder.policy.first import first_or_counting
from learner import checkpoint
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.training.rows import Rows, empty, joined

log = logging.getLogger(__name__)

PARTS: Final = 8
"""Files of rows that a full buffer lies in, about."""
KNOWN: Final = 1_000
"""Scopes kept at all; a file has at most some megabytes."""


@dataclass(frozen=True)
class Entry:
    """What is known of a scope: its file, events with a draft or without, and the files
    that hold the rows of its buffer, oldest first: each from a number to before another."""

    file: str
    events: int
    rows: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Files:
    """What a checkpoint says of all scopes, as in :class:`Scopes`; ``serial`` numbers the files."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    serial: int = 0
    lost: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def beginning(name: str, settings: LearnerSettings) -> Policy:
    """What scope ``name`` begins with, and what contends whenever another policy is served."""
    if settings.start == "counting":
        return replace(frequency_policy(name), role=FIRST)
    return first_or_counting(name)


_NONE: Final = Files()


class Scopes:
    """Scopes by name, made when they are first asked for; ``awake`` holds those in memory.

    ``entries`` is in the order in which they were last heard of. ``lost`` counts, of their events,
    those whose lesson is gone, by scope and reason: ``fault`` (in memory beside a record that could
    not be learned from), ``disk`` (not written), ``damaged`` (in a file), ``side`` (drafts within
    other limits than the worker's own).
    """

    def __init__(self, settings: LearnerSettings, files: Files = _NONE) -> None:
        self.awake: OrderedDict[str, Scope] = OrderedDict()
        self.entries = OrderedDict(files.entries)
        self.lost = {name: Counter(reasons) for name, reasons in files.lost.items()}
        # events of those awake that lie in their file or are lost
        self._settled: dict[str, int] = {}
        self._serial = files.serial
        self._settings = settings
        self._folder = settings.state_dir / "scopes"
        self._changed: set[str] = set()
        self._saved = self._named()
        self._before = {path.name for path in self._folder.glob("*")}

    @property
    def files(self) -> Files:
        """What to go on from."""
        return Files(self.entries, self._serial, self.lost)

    def of(self, name: str, events: int = 0) -> Scope:
        """The scope ``name``, woken or made, that has come to ``events`` more; to be changed."""
        if name not in self.awake:
            if len(self.awake) >= self._settings.awake_scopes:
                self._rest(next(iter(self.awake)))
            self.awake[name] = self._woken(name)
        self.awake.move_to_end(name)
        entry = self.entries.get(name, Entry("", 0))
        self.entries[name] = replace(entry, events=entry.events + events)
        self.entries.move_to_end(name)
        if len(self.entries) > KNOWN:
            oldest, _ = self.entries.popitem(last=False)
            self.lost.pop(oldest, None)
        self._changed.add(name)
        return self.awake[name]

    def pass_over(self, name: str, reason: str, events: int) -> None:
        """Of those that ``name``, awake, has come to, so many are not learned from."""
        self._lose(name, reason, events)
        self._settled[name] += events

    def abandon(self, name: str, reason: str) -> None:
        """Go back to what was saved of ``name`` last: what is in memory cannot be relied on."""
        if self.awake.pop(name, None) is not None:
            self._lose(name, reason, self.entries[name].events - self._settled.pop(name))
        self._changed.discard(name)

    def save(self) -> int:
        """Write what has changed, and tell its bytes. Files that the checkpoint before names are
        still there.

        Raises:
            OSError: the disk refuses; the next call tries again.
        """
        return sum(self._write(name) for name in sorted(self._changed & self.awake.keys()))

    def sweep(self, saved: bool = True) -> None:
        """Delete files that neither the checkpoint in force nor the one before it names.

        Args:
            saved: False where what is here could not be saved: the checkpoint in force is still
                the last one, and of what was written since all goes that something newer replaced.
        """
        named = self._named()
        if saved:
            self._before, self._saved = self._saved, named
        for path in self._folder.glob("*"):
            if path.name not in named | self._saved | self._before:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _rest(self, name: str) -> None:
        try:
            if name in self._changed:
                self._write(name)
        except OSError as error:
            log.error(
                "scope %s: what it learned since the last checkpoint is lost: %s", name, error
            )
        self.abandon(name, "disk")

    def _named(self) -> set[str]:
        rows = (part for entry in self.entries.values() for part in entry.rows)
        return {entry.file for entry in self.entries.values()} | {file for file, _, _ in rows}

    def _write(self, name: str) -> int:
        """The scope without its rows, and those that came since; the bytes.

        Files of rows that are no larger than what is added are written anew with it, up to a part
        of the buffer: so each row is written a few times, and there are some dozen files at most.
        """
        buffer, entry = self.awake[name].buffer, self.entries[name]
        oldest, rows, written = buffer.total - len(buffer), list(entry.rows), 0
        first = max(rows[-1][2] if rows else 0, oldest)
        if first < buffer.total:
            while (
                rows
                and rows[-1][1] >= oldest
                and (
                    rows[-1][2] - rows[-1][1] <= buffer.total - first
                    and buffer.total - rows[-1][1] <= buffer.capacity // PARTS
                )
            ):
                first = rows.pop()[1]
            file, size = self._put(f"{name}.rows", dict(vars(buffer.recent(buffer.total - first))))
            rows.append((file, first, buffer.total))
            written += size
        kept = tuple(part for part in rows if part[2] > oldest)
        file, size = self._put(name, self.awake[name].snapshot())
        self.entries[name] = Entry(file, entry.events, kept)
        self._settled[name] = entry.events
        self._changed.discard(name)
        return written + size

    def _put(self, name: str, tree: checkpoint.Tree) -> tuple[str, int]:
        self._serial += 1
        file = f"{name}.{self._serial}.safetensors"
        return file, checkpoint.write(self._folder / file, tree)

    def _lose(self, name: str, reason: str, events: int) -> None:
        if events:
            self.lost.setdefault(name, Counter())[reason] += events

    def _woken(self, name: str) -> Scope:
        entry = self.entries.get(name, Entry("", 0))
        file, self._settled[name] = entry.file, entry.events
        if file:
            try:
                tree = checkpoint.read(self._folder / file)
                rows = [Rows(**checkpoint.read(self._folder / part)) for part, _, _ in entry.rows]
                return Scope.restored(name, self._settings, tree, joined([empty(), *rows]))
            except _UNUSABLE as error:
                log.error(
                    "scope %s: %s is unusable, damaged or of another release (%r): it is learned "
                    "anew, and what is served stays", name, file, error,
                )  # fmt: skip
                # else its rows, of higher numbers, would keep all new ones from being written
                self.entries[name] = replace(entry, file="", rows=())
                before = self.lost.get(name, Counter[str]()).total()
                self._lose(name, "damaged", entry.events - before)
        return Scope(name, self._settings, beginning(name, self._settings))


_UNUSABLE: Final[tuple[type[Exception], ...]] = (
    OSError, SafetensorError, ContractError, KeyError, ValueError, TypeError, IndexError,
)  # fmt: skip
