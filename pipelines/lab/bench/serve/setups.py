"""The servers that ``hvd bench serve`` compares, and the plan of a run.

=============== ==================================================================================
none            vLLM without speculation
suffix          vLLM's own suffix decoding, one setup for each draft limit k
eagle3          vLLM's own EAGLE3, one setup for each k, with its padded drafter batch and without:
                padding drafts in fixed shapes and keeps asynchronous scheduling; without it,
                requests with nothing to verify draft no token
eagle3-v2       EAGLE3 on the V2 model runner, scheduled asynchronously and step by step
eagle3-adaptive EAGLE3 scheduled asynchronously, with vLLM's adaptive verification
hybrid          this project's plugin, telemetry off
=============== ==================================================================================

They differ only in the speculative configuration and the plugin's settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import ModelError, SettingsError
from decoder.contracts.masking import masked
from decoder.policy.first import first_policy
from pipelines import machine
from pipelines.lab.bench.methods import describe, numbers, words
from pipelines.lab.bench.options import ServingOptions
from pipelines.lab.bench.serve.load import SLICE_S, Selection, from_workloads, levels, turns
from pipelines.policy.moves import load_policy
from pipelines.prompts import Prompt
from pipelines.serve.command import ServeOptions, chosen, serve_command, speculative_config

Method = Literal["none", "suffix", "eagle3", "eagle3-v2", "eagle3-adaptive", "hybrid"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
SUFFIX_DEPTH: Final = 24
"""vLLM's default depth of the suffix trees. It bounds drafts, so a larger k raises it."""


@dataclass(frozen=True)
class Setup:
    """One server to measure.

    ``k`` bounds its drafts, in tokens. ``padded`` applies to EAGLE3, ``ahead`` (asynchronous
    scheduling) to the V2 runner.
    """

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
                "disable_eagle_block_drop": True,  # as in hybrid
                "enable_adaptive_verification": self.method == "eagle3-adaptive",
            }
        return None


def setups(
    methods: Sequence[str], eagle3_k: Sequence[int], suffix_k: Sequence[int], drafter: str | None
) -> tuple[Setup, ...]:
    """The servers to measure for ``methods``; ``none`` comes first, as the reference.

    Raises:
        SettingsError: a method is unknown, or none was named.
        ModelError: EAGLE3 has no drafter.
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
        options: those of ``hvd serve``; methods without a drafter ignore it.
        policy: the hybrid's bundle; None: the one it starts with by default.
    """
    arguments, env = serve_command(options, environment, flags, on_cpu)
    at = arguments.index("--speculative-config")
    if setup.method == "hybrid":
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
    """A whole benchmark.

    ``levels`` are the concurrencies with the prompts of each. ``decides_by`` describes the policy
    that the hybrid starts with, and ``policy`` is its bundle, if one was named. With ``together``
    all servers of a round run at once, in time slices.
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
        """The model's name in requests."""
        return self.options.served_name or self.options.model

    @property
    def requests(self) -> int:
        """The number of requests that a server gets."""
        return sum(len(turns(p)) for _, level in self.levels for p in level)

    @property
    def has_sessions(self) -> bool:
        """Whether any prompt is a session of several requests."""
        return any(len(turns(p)) > 1 for _, level in self.levels for p in level)

    def setting(self) -> dict[str, Any]:
        """The setting of the run, JSON-ready."""
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


def runs_in(dtype: str) -> str:
    """The servers' number format; ``auto`` where vLLM chooses it."""
    on_cpu = not machine.has_accelerator()
    return machine.serving_dtype(machine.cpu_flags()) if dtype == "auto" and on_cpu else dtype


def planned(o: ServingOptions, extra: Sequence[str], problems: list[str]) -> Plan:
    """The plan that ``o`` and the servers' ``extra`` arguments ask for.

    Prompts that are left out become sentences in ``problems``.

    Raises:
        ModelError, SettingsError: an option is wrong, or there are too few prompts.
    """
    if o.check and (runs_in(o.dtype) != "float32" or "none" not in words(o.configs)):
        raise SettingsError(
            "--check compares with 'none' token for token, which half precision cannot promise: "
            "give --dtype float32 and name none with --configs."
        )
    if o.policy is not None and not o.policy.is_file():
        raise SettingsError(f"--policy {o.policy}: no such file.")
    options = chosen(o.model, o.drafter, "127.0.0.1", 0, o.dtype, extra)
    lengths = numbers(o.eagle3_k, "--eagle3-k"), numbers(o.suffix_k, "--suffix-k")
    compared = setups(words(o.configs), *lengths, options.drafter)
    concurrency = numbers(o.concurrency, "--concurrency")
    budget = o.max_prompt_tokens - o.turns * o.max_tokens * o.sessions
    wanted = Selection(o.prompts, concurrency, o.limit, budget, o.turns * o.sessions)
    (warm_up,) = from_workloads(max(concurrency), ["chat"])
    prompts = levels(wanted, options.model, problems)
    decides_by = describe(load_policy(o.policy) if o.policy else first_policy(ANY_SCOPE))
    return Plan(
        compared, options, prompts, warm_up.prompts, o.max_tokens, o.rounds, o.policy, decides_by,
        o.together,
    )  # fmt: skip


SECRET_NAME: Final = re.compile(r"(?i)(PASSWORD|SECRET|TOKEN|KEY)$")


def masked_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with secrets masked, for a report."""
    return {
        name: "***" if SECRET_NAME.search(name) else masked(value)
        for name, value in sorted(variables.items())
    }
