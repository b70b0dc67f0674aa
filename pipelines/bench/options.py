"""What a person asked ``hvd bench decode`` for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import SettingsError
from pipelines.bench.datasets import PROMPTS
from pipelines.prompts import Template, TooLong

CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "template": ("chat", "none", "both"),
    "too_long": ("skip", "truncate"),
    "clock": ("wall", "cpu"),
    "dtype": ("float32", "bfloat16", "float16"),
}


def _check(options: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(options, name)) not in CHOICES[name]:
            option = f"--{name.replace('_', '-')} {value}"
            raise SettingsError(f"{option}: choose {', '.join(CHOICES[name])}.")


@dataclass(frozen=True)
class Selection:
    """Which prompts, of a folder or the hub, in which ``template``; lengths are in tokens.

    Raises:
        SettingsError: no such template, or nothing that can be done with what is too long.
    """

    folder: Path | None = None
    datasets: tuple[str, ...] = ()
    limit: int = PROMPTS
    warmup: int = 1
    max_prompt_tokens: int | None = None
    too_long: str = "skip"
    template: str = "chat"

    def __post_init__(self) -> None:
        _check(self, "template", "too_long")

    @property
    def fits(self) -> TooLong:
        """How a prompt that is too long is made to fit."""
        return "truncate" if self.too_long == "truncate" else "skip"

    @property
    def templates(self) -> tuple[Template, ...]:
        """One after the other."""
        if self.template == "both":
            return "chat", "none"
        return ("none",) if self.template == "none" else ("chat",)


@dataclass(frozen=True)
class Engine:
    """The checkpoints, where and how they are computed, and how that is timed.

    ``model`` None is the embedded one. ``policies`` are ``FILE`` or ``label=FILE``.

    Raises:
        SettingsError: no such dtype or clock, or a clock that does not see the device.
    """

    model: str | None = None
    drafter: str | None = None
    policies: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    clock: str = "wall"

    def __post_init__(self) -> None:
        _check(self, "clock", "dtype")
        if self.clock == "cpu" and self.device != "cpu":
            raise SettingsError(
                "--clock cpu does not see a device's time: use it with --device cpu."
            )


@dataclass(frozen=True)
class Options:
    """A whole run. ``minutes`` None is without end; the settings name ``out`` where it is None."""

    methods: str = "greedy,eagle3,suffix,frequency,hybrid"
    selection: Selection = field(default_factory=Selection)
    engine: Engine = field(default_factory=Engine)
    max_tokens: int = 128
    minutes: float | None = None
    out: Path | None = None
    fresh: bool = False
