"""What ``hvd bench serve`` compares: one way of starting the server each.

======== =========================================================================================
none     vLLM without speculation
suffix   vLLM's own suffix decoding, one setup for each draft limit k
eagle3   vLLM's own EAGLE3, one setup for each k, with its padded drafter batch and without:
         padding drafts in fixed shapes and keeps asynchronous scheduling, the other drafts no
         token for requests that have none to verify
hybrid   this project's plugin, telemetry off
variant  the same with settings that a person wants to compare with it
======== =========================================================================================

Everything but the speculative configuration and the plugin's switches is the same in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from decoder.contracts.errors import ModelError, SettingsError
from decoder.settings import WorkerSettings
from pipelines.serve.command import ServeOptions, serve_command

Method = Literal["none", "suffix", "eagle3", "hybrid", "variant"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
BASELINES: Final = METHODS[:-1]
"""What a configuration is held to: any other method but a variant."""
SUFFIX_DEPTH: Final = 24
"""vLLM's default depth of the suffix trees; drafts cannot be longer, so a larger k raises it."""
PLUGIN_SWITCHES: Final = ("HVD_WORKER_ENABLED", "VLLM_USE_V2_MODEL_RUNNER")


@dataclass(frozen=True)
class Setup:
    """One server to measure: ``k`` drafted tokens at most; ``padded`` is EAGLE3's alone, and
    ``changes`` a variant's, variables of the worker with their values."""

    name: str
    method: Method
    k: int | None = None
    padded: bool | None = None
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def ours(self) -> bool:
        """Whether the plugin decides."""
        return self.method in ("hybrid", "variant")

    def speculative_config(self, drafter: str | None) -> dict[str, Any] | None:
        """vLLM's ``--speculative-config`` for a stock server; None without speculation."""
        shared = {"method": self.method, "num_speculative_tokens": self.k}
        if self.method == "suffix":
            return {**shared, "suffix_decoding_max_tree_depth": max(SUFFIX_DEPTH, self.k or 0)}
        if self.method == "eagle3":
            return {
                **shared,
                "model": drafter,
                "disable_padded_drafter_batch": not self.padded,
                "disable_eagle_block_drop": True,  # as the hybrid: shared prefixes are read once
            }
        return None


ALIKE: Final = ("ENABLED", "TELEMETRY", "HOLDOUT")
"""What every server of ours is given, so that nothing but what is asked for differs."""
_VARIANT: Final = re.compile(
    r"([\w.-]{1,16}):(HVD_WORKER_[A-Z_]+=[^,]*)(, *HVD_WORKER_[A-Z_]+=[^,]*)*"
)


def variants(texts: Sequence[str]) -> tuple[Setup, ...]:
    """What ``NAME:HVD_WORKER_...=VALUE``, several with commas between them, says each.

    Raises:
        SettingsError: it says something else, what no worker takes, or what is the same in all.
    """
    made = []
    for text in texts:
        name, _, said = text.partition(":")
        changes = dict(part.partition("=")[::2] for part in re.split(r", *", said))
        asked = {key.removeprefix("HVD_WORKER_"): value for key, value in changes.items()}
        if not _VARIANT.fullmatch(text) or not asked.keys().isdisjoint(ALIKE):
            raise SettingsError(
                f"--variant {text!r}: give NAME:HVD_WORKER_...=VALUE, with commas between several "
                "and in no value, and a name of at most 16 letters. "
                f"{', '.join(ALIKE)} are the same in every server."
            )
        WorkerSettings.load(**{key.lower(): value for key, value in asked.items()})
        made.append(Setup(name, "variant", changes=tuple(changes.items())))
    return tuple(made)


def setups(
    methods: Sequence[str],
    eagle3_k: Sequence[int],
    suffix_k: Sequence[int],
    drafter: str | None,
    varied: Sequence[Setup] = (),
) -> tuple[Setup, ...]:
    """The servers that measuring ``methods`` takes, ``none`` first: the others are held to it. Last
    come ``varied``.

    Raises:
        SettingsError: an unknown method, or a name that comes twice.
        ModelError: EAGLE3 without a drafter.
    """
    if not methods or not {*methods} <= {*BASELINES}:
        unknown = ", ".join(m for m in methods if m not in BASELINES) or "was named"
        raise SettingsError(f"no configuration {unknown}: choose from {', '.join(BASELINES)}.")
    if "eagle3" in methods and drafter is None:
        raise ModelError("eagle3 needs a drafter made for the model: name one with --drafter.")
    kinds: dict[Method, list[Setup]] = {
        "none": [Setup("none", "none")],
        "suffix": [Setup(f"suffix-k{k}", "suffix", k) for k in suffix_k],
        "eagle3": [
            Setup(f"eagle3-k{k}" + "-unpadded" * (not padded), "eagle3", k, padded)
            for k in eagle3_k
            for padded in (True, False)
        ],
        "hybrid": [Setup("hybrid", "hybrid")],
    }
    made = [setup for method in BASELINES if method in methods for setup in kinds[method]]
    taken = [*METHODS, *(s.name for s in (*made, *varied))]
    if twice := [s.name for s in varied if taken.count(s.name) > 1]:
        raise SettingsError(f"--variant: {twice[0]!r} names another configuration.")
    return (*made, *varied)


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
    if setup.ours:  # the other setups are what it is compared with, so nothing is held out
        own = {"HVD_WORKER_TELEMETRY": "false", "HVD_WORKER_HOLDOUT": "0"}
        if policy is not None:
            own["HVD_WORKER_POLICY_FILE"] = str(policy.resolve())
        return arguments, {**env, **own, **dict(setup.changes)}
    for name in PLUGIN_SWITCHES:  # what the caller set himself stays
        if name in environment and name != "HVD_WORKER_ENABLED":
            env[name] = environment[name]
        else:
            env.pop(name, None)
    config = setup.speculative_config(options.drafter)
    stock = [] if config is None else ["--speculative-config", json.dumps(config)]
    return [*arguments[:at], *stock, *arguments[at + 2 :]], env
