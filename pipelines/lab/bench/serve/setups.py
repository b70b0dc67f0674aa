"""What ``hvd bench serve`` compares: one way of starting the server each.

=============== ==================================================================================
none            vLLM without speculation
suffix          vLLM's own suffix decoding, one setup for each draft limit k
eagle3          vLLM's own EAGLE3, one setup for each k, with its padded drafter batch and without:
                padding drafts in fixed shapes and keeps asynchronous scheduling, the other drafts
                no token for requests that have none to verify
eagle3-v2       the same on the V2 model runner, scheduled asynchronously and step by step
eagle3-adaptive the same asynchronously, with vLLM's adaptive verification
hybrid          this project's plugin, telemetry off
=============== ==================================================================================

Everything but the speculative configuration and the plugin's switches is the same in all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from decoder.contracts.errors import ModelError, SettingsError
from decoder.contracts.masking import masked
from pipelines.lab.bench.serve.load import SLICE_S, turns
from pipelines.prompts import Prompt
from pipelines.serve.command import ServeOptions, serve_command, speculative_config

Method = Literal["none", "suffix", "eagle3", "eagle3-v2", "eagle3-adaptive", "hybrid"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
SUFFIX_DEPTH: Final = 24
"""vLLM's default depth of the suffix trees; drafts cannot be longer, so a larger k raises it."""


@dataclass(frozen=True)
class Setup:
    """One server to measure: ``k`` drafted tokens at most; ``padded`` is EAGLE3's alone, and
    ``ahead``, whether it is scheduled asynchronously, of those on the V2 runner."""

    name: str
    method: Method
    k: int | None = None
    padded: bool | None = None
    ahead: bool | None = None

    def speculative_config(self, drafter: str | None) -> dict[str, Any] | None:
        """vLLM's ``--speculative-config`` for a stock server; None without speculation."""
        method = self.method.partition("-")[0]
        shared = {"method": method, "num_speculative_tokens": self.k}
        if method == "suffix":
            return {**shared, "suffix_decoding_max_tree_depth": max(SUFFIX_DEPTH, self.k or 0)}
        if method == "eagle3":
            return {
                **shared,
                "model": drafter,
                "disable_padded_drafter_batch": not self.padded,
                "disable_eagle_block_drop": True,  # as the hybrid: shared prefixes are read once
                "enable_adaptive_verification": self.method == "eagle3-adaptive",
            }
        return None


def setups(
    methods: Sequence[str], eagle3_k: Sequence[int], suffix_k: Sequence[int], drafter: str | None
) -> tuple[Setup, ...]:
    """The servers that measuring ``methods`` takes, ``none`` first: the others are held to it.

    Raises:
        SettingsError: an unknown method.
        ModelError: EAGLE3 without a drafter.
    """
    if not methods or not {*methods} <= {*METHODS}:
        unknown = ", ".join(m for m in methods if m not in METHODS) or "was named"
        raise SettingsError(f"no configuration {unknown}: choose from {', '.join(METHODS)}.")
    if drafter is None and any(method.startswith("eagle3") for method in methods):
        raise ModelError("eagle3 needs a drafter made for the model: name one with --drafter.")
    kinds: dict[Method, list[Setup]] = {
        "none": [Setup("none", "none")],
        "suffix": [Setup(f"suffix-k{k}", "suffix", k) for k in suffix_k],
        "eagle3": [
            Setup(f"eagle3-k{k}" + "-unpadded" * (not padded), "eagle3", k, padded)
            for k in eagle3_k
            for padded in (True, False)
        ],
        "eagle3-v2": [
            Setup(f"eagle3-v2-k{k}" + "-sync" * (not ahead), "eagle3-v2", k, True, ahead)
            for k in eagle3_k
            for ahead in (True, False)
        ],
        "eagle3-adaptive": [
            Setup(f"eagle3-adaptive-k{k}", "eagle3-adaptive", k, True, True) for k in eagle3_k
        ],
        "hybrid": [Setup("hybrid", "hybrid")],
    }
    return tuple(setup for method in METHODS if method in methods for setup in kinds[method])


def command(
    setup: Setup,
    options: ServeOptions,
    environment: Mapping[str, str],
    flags: frozenset[str],
    on_cpu: bool,
    policy: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment of the server for ``setup``.

    Args:
        options: as ``hvd serve`` takes them; the drafter is used where the method has one.
        policy: bundle the hybrid decides by; None: the one it would start with.
    """
    arguments, env = serve_command(options, environment, flags, on_cpu)
    at = arguments.index("--speculative-config")
    if setup.method == "hybrid":  # compared with the other setups, so nothing is held out
        own = {"HVD_WORKER_TELEMETRY": "false", "HVD_WORKER_HOLDOUT": "0"}
        if policy is not None:
            own["HVD_WORKER_POLICY_FILE"] = str(policy.resolve())
        return arguments, {**env, **own}
    del env["HVD_WORKER_ENABLED"]
    config = setup.speculative_config(options.drafter)
    stock = [] if config is None else ["--speculative-config", json.dumps(config)]
    if setup.ahead is not None:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        stock.append("--async-scheduling" if setup.ahead else "--no-async-scheduling")
    return [*arguments[:at], *stock, *arguments[at + 2 :]], env


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
            "environment": masked_variables(
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


def masked_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables as a report may show them, by name."""
    return {
        name: "***" if _SECRET_NAME.search(name) else masked(value)
        for name, value in sorted(variables.items())
    }


_SECRET_NAME: Final = re.compile(r"(?i)(PASSWORD|SECRET|TOKEN|KEY)$")
