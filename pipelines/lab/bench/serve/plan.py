"""What a serving benchmark compares, on what, and how much of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoder.contracts.redacted import told
from pipelines.lab.bench.serve.load import turns
from pipelines.lab.bench.serve.setups import Setup
from pipelines.lab.bench.serve.slices import SLICE_S
from pipelines.prompts import Prompt
from pipelines.serve.command import ServeOptions, speculative_config


@dataclass(frozen=True)
class Plan:
    """A whole benchmark: ``levels`` are numbers of requests at a time, with the prompts for each.

    ``decides_by`` describes the policy that the hybrid starts with, ``policy`` if that is named.
    ``together``: all servers of a round are up at once and run in slices.
    """

    setups: tuple[Setup, ...]
    options: ServeOptions
    levels: tuple[tuple[int, tuple[Prompt, ...]], ...]
    warm_up: tuple[Prompt, ...]
    max_tokens: int
    rounds: int = 1
    policy: Path | None = None
    decides_by: str = "counted score"
    together: bool = False

    @property
    def model(self) -> str:
        """How the server calls the model."""
        return self.options.served_name or self.options.model

    @property
    def requests(self) -> int:
        """How many answers a server gives if none fails."""
        return sum(len(turns(p)) for _, level in self.levels for p in level)

    @property
    def has_sessions(self) -> bool:
        """Whether a prompt is a session of several requests."""
        return any(len(turns(p)) > 1 for _, level in self.levels for p in level)

    def setting(self) -> dict[str, Any]:
        """What the figures hold for, JSON-ready."""
        return {
            "model": self.options.model,
            "drafter": self.options.drafter,
            "dtype": self.options.dtype,
            "hybrid": speculative_config(self.options.drafter),
            "server_arguments": list(self.options.extra),
            "policy": self.decides_by,
            "environment": told(
                {k: v for k, v in os.environ.items() if k.startswith(("HVD_", "VLLM_"))}
            ),
            "concurrency": [at_once for at_once, _ in self.levels],
            "max_tokens": self.max_tokens,
            "together": f"{SLICE_S:g} s" if self.together else False,
            "prompts": [
                [f"{p.dataset}:{p.id}, {len(turns(p))} turns" for p in level]
                for _, level in self.levels
            ],
        }
