"""The stack under trial: supervised as ``hvd up`` does it, but for what is held back on purpose."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Final

import psutil

from decoder.contracts.errors import ProcessError
from pipelines.chaos.topic_audit import TopicAudit
from pipelines.stack.running import Stack
from pipelines.stack.supervision import Pauses, Watch, look
from pipelines.workloads import Prompt

LOOK_S: Final = 0.1
PATIENCE_S: Final = 600.0  # vLLM on busy cores takes minutes to start


@dataclass
class Stage:
    """A running stack whose parts can be held back; ``answers`` are the right ones to ``asked``.

    ``said`` is what supervision said of its parts; ``back`` in how many seconds after the trouble
    each that was hit was seen at work again; ``draw`` whatever trouble leaves to chance.
    """

    stack: Stack
    root: Path
    audit: TopicAudit
    watches: dict[str, Watch]
    asked: list[Prompt]
    answers: list[tuple[int, ...]]
    draw: random.Random
    held: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    back: dict[str, float] = field(default_factory=dict)

    def within(self, seconds: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Wait for ``condition`` so long at most, and start again what ends meanwhile, unless it is
        held back; whether it came true. Main thread only.
        """
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            for name in self.watches.keys() - self.held:
                look(self.watches[name], self.stack.children, self.said.append, Pauses())
            time.sleep(LOOK_S)
        return True

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``.

        Raises:
            ProcessError: it did not come true in time.
        """
        if not self.within(PATIENCE_S, condition):
            raise ProcessError(f"waited in vain for {what}; {'; '.join(self.said[-5:])}")

    def pid(self, name: str) -> int:
        """Of the leader of a part's processes; 0 where there is none, or it is not ready."""
        child = self.stack.children.get(name)
        serves = child is not None and child.is_alive and self.watches[name].serves_since
        return child.process.pid if child is not None and serves else 0

    def tree(self, name: str) -> list[psutil.Process]:
        """The part's processes, its leader first."""
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.pid(name))
            return [leader, *leader.children(recursive=True)]
        return []

    def send(self, number: Signals, *names: str) -> None:
        """A signal to the leaders; what is left of a part goes when it is started again."""
        for leader in [self.tree(name)[0] for name in names]:
            leader.send_signal(number)

    @contextmanager
    def down(self, name: str, number: Signals = SIGKILL) -> Iterator[None]:
        """A part ends, and is not started again inside the block."""
        self.held.add(name)
        try:
            self.send(number, name)
            self.stack.children[name].process.wait()
            yield
        finally:
            self.held.discard(name)

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """A part's processes stand still inside the block."""
        stopped = self.tree(name)
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    @contextmanager
    def full(self, name: str) -> Iterator[None]:
        """No file of a part may grow inside the block: what a full disk does to whoever writes.

        A limit on the size of files, set from outside; the error is EFBIG and not ENOSPC. Python
        ignores the signal that comes with it; other programs die of it.
        """
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            self._limit(name, (0, usual[1]))
            yield
        finally:
            self._limit(name, usual)  # also of what it has started since

    def _limit(self, name: str, limits: tuple[int, int]) -> None:
        for process in self.tree(name):
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
