"""A part of the stack: how its process is started, and how to tell that it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.stack import interrupts, processes
from pipelines.stack.processes import Child


@dataclass(frozen=True)
class Part:
    """One process of the stack, the same at its first start and at every later one.

    ``is_ready`` asks, within seconds, whether it serves; ``patience_s`` is how long it may take
    until it does.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path
    is_ready: Callable[[], bool]
    patience_s: float
    environment: Mapping[str, str] | None = None
    niceness: int = 0


def begin(part: Part, children: dict[str, Child], again: bool = False) -> Child:
    """Start the process of ``part`` and put it among ``children``, whatever signal comes.

    Args:
        again: its log goes on where its last life ended.

    Raises:
        ProcessError: the program cannot be run.
    """
    with interrupts.held():
        child = children[part.name] = processes.start(
            part.name, part.arguments, part.log, part.environment, part.niceness, again
        )
    return child
