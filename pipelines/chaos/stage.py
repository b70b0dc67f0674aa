"""The stack under trial: supervised as ``hvd up`` does it, but for what is held back on purpose."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from decoder.contracts.errors import ProcessError
from pipelines.chaos.heard import Heard
from pipelines.stack import processes
from pipelines.stack.running import Home, Stack
from pipelines.stack.supervision import Pauses, Watch, look

LOOK_S: Final = 0.1
CARRIER: Final = "decoder.telemetry"
"""The module that a carrier's process runs."""
DRAIN_S: Final = 45.0
"""What requests under way have when a worker is told to end: as the fleet's files give them."""
TERM_S: Final = DRAIN_S + 30.0
PATIENCE_S: Final = 600.0
"""Until a part is given up: vLLM on busy cores takes minutes to start."""


@dataclass
class Stage:
    """A running stack whose parts can be held back; ``said`` is what supervision said of them, and
    ``heard`` what its topics say.
    """

    stack: Stack
    root: Path
    heard: Heard
    watches: dict[str, Watch] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)

    @property
    def home(self) -> Home:
        """Where the stack keeps what it writes."""
        return Home.under(self.root)

    @property
    def spill(self) -> Path:
        """Where its worker keeps events while the broker is away."""
        return self.root / "spill"

    def __post_init__(self) -> None:
        now = time.monotonic()
        for part in self.stack.parts.values():
            self.watches[part.name] = Watch(part, serves_since=now)

    def tick(self) -> None:
        """Start again what ended, unless it is held back. Main thread only."""
        for name, watch in self.watches.items():
            if name not in self.held:
                look(watch, self.stack.children, self.said.append, Pauses())

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tick()
            time.sleep(LOOK_S)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``.

        Raises:
            ProcessError: it did not come true in time.
        """
        if not self.within(PATIENCE_S, condition):
            last = "\n".join(self.said[-5:])
            raise ProcessError(f"waited {PATIENCE_S:.0f} s in vain for {what}.\n{last}")

    def within(self, seconds: float, condition: Callable[[], bool]) -> bool:
        """Wait for ``condition`` so long at most; whether it came true."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.tick()
            time.sleep(LOOK_S)
        return True

    def serves(self, name: str) -> bool:
        """Whether the part runs and was ready."""
        child = self.stack.children.get(name)
        return child is not None and child.is_alive and self.watches[name].serves_since is not None

    def pid(self, name: str) -> int:
        """Of the leader of a part's processes; 0 where there is none."""
        child = self.stack.children.get(name)
        return child.process.pid if child is not None and child.is_alive else 0

    def tree(self, name: str) -> list[psutil.Process]:
        """The part's processes, its leader first."""
        try:
            leader = psutil.Process(self.pid(name))
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, name: str) -> None:
        """SIGKILL to its leader; what is left of the part goes when it is started again."""
        for process in self.tree(name)[:1]:
            process.kill()

    @contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """Do not start a part again inside the block."""
        self.held.add(name)
        try:
            yield
        finally:
            self.held.discard(name)

    @contextmanager
    def down(self, name: str) -> Iterator[None]:
        """Kill a part, and do not start it again inside the block."""
        with self.holding(name):
            self.kill(name)
            child = self.stack.children.get(name)
            if child is not None:
                child.process.wait()
            yield

    @contextmanager
    def ended(self, name: str) -> Iterator[None]:
        """Inside the block no process of a part is left: all are killed but the carrier of events,
        which puts down what it has and leaves by itself.
        """
        tree = self.tree(name)
        with self.holding(name):
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    if CARRIER not in process.cmdline():
                        process.kill()
            if child := self.stack.children.get(name):
                child.process.wait()
            psutil.wait_procs(tree[1:], TERM_S)
            yield

    def start_again(self, name: str, further: Mapping[str, str]) -> None:
        """Let a part end by SIGTERM, and begin with ``further`` variables; wait until it serves."""
        watch = self.watches[name]
        watch.part = replace(
            watch.part, environment={**(watch.part.environment or os.environ), **further}
        )
        before = self.pid(name)
        with self.holding(name):
            if child := self.stack.children.get(name):
                processes.stop([child], TERM_S)
        self.until(
            f"{name} to serve again",
            lambda: self.pid(name) not in (0, before) and self.serves(name),
        )

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop a part's processes where they are, inside the block."""
        stopped = self.tree(name)
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                if process.is_running():
                    process.resume()

    @contextmanager
    def full(self, name: str) -> Iterator[None]:
        """No file of the part may grow inside the block: what a full disk does to whoever writes.

        A limit on the size of files (RLIMIT_FSIZE), set from outside; the error is EFBIG and not
        ENOSPC. Python ignores the signal that comes with it; other programs die of it.
        """
        before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        self._limit(name, 0)
        try:
            yield
        finally:
            self._limit(name, before)  # also of what the part has started meanwhile

    def _limit(self, name: str, size: int) -> None:
        """Let the files of the part's processes grow up to ``size`` bytes."""
        for process in self.tree(name):
            with suppress(ProcessLookupError):
                hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))
