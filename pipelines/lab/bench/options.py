"""What a person asked of a benchmark: lists between commas, and all of ``hvd bench decode``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decoder.contracts.errors import SettingsError
from pipelines.lab.bench.datasets import PROMPTS
from pipelines.prompts import TooLong


def words(text: str) -> tuple[str, ...]:
    """The words between the commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """The positive numbers between the commas, each once.

    Raises:
        SettingsError: none, or something else.
    """
    found = words(text)
    if not found or not all(word.isdecimal() and int(word) for word in found):
        raise SettingsError(f"{option} {text!r}: give positive numbers with commas between them.")
    return tuple(int(word) for word in found)


Dtype = Literal["float32", "bfloat16", "float16"]
Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Selection:
    """Which prompts, of a folder or the hub, and how much of them; lengths are in tokens."""

    folder: Path | None = None
    datasets: tuple[str, ...] = ()
    limit: int = PROMPTS
    warmup: int = 1
    max_prompt_tokens: int | None = None
    too_long: TooLong = "skip"
    max_tokens: int = 128
    minutes: float | None = None


@dataclass(frozen=True)
class Engine:
    """The checkpoints, where and how they are computed, and how that is timed.

    ``model`` None is the embedded one. ``policies`` are ``FILE`` or ``label=FILE``.

    Raises:
        SettingsError: a clock that does not see the device.
    """

    model: str | None = None
    drafter: str | None = None
    policies: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    clock: Clock = "wall"

    def __post_init__(self) -> None:
        if self.clock == "cpu" and self.device != "cpu":
            raise SettingsError("--clock cpu does not see a device: use it with --device cpu.")
