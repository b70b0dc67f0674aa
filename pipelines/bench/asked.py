"""What a person asked ``hvd bench decode`` for: models, policies and the settings of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import SettingsError
from decoder.policy.first import first_policy
from pipelines import embedded, machine
from pipelines.bench import methods
from pipelines.bench.datasets import PROMPTS
from pipelines.prompts import Template, TooLong
from pipelines.replay.bundles import digest_of, load_policy

if TYPE_CHECKING:
    from decoder.contracts.bundle import Policy

FOLDER: Final = Path("reports/bench")
DTYPES: Final = ("float32", "bfloat16", "float16")
CLOCKS: Final = ("wall", "cpu")
TOO_LONG: Final[dict[str, TooLong]] = {"skip": "skip", "truncate": "truncate"}
TEMPLATES: Final[dict[str, tuple[Template, ...]]] = {
    "chat": ("chat",),
    "none": ("none",),
    "both": ("chat", "none"),
}


@dataclass(frozen=True)
class Asked:
    """The command's options. Lengths are in tokens; ``model`` None is the embedded one."""

    prompts: Path | None = None
    datasets: tuple[str, ...] = ()
    methods: str = "greedy,eagle3,suffix,frequency,hybrid"
    limit: int = PROMPTS
    warmup: int = 1
    max_tokens: int = 128
    max_prompt_tokens: int | None = None
    too_long: str = "skip"
    template: str = "chat"
    model: str | None = None
    drafter: str | None = None
    policies: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    out: Path | None = None
    fresh: bool = False
    minutes: float | None = None
    clock: str = "wall"

    def __post_init__(self) -> None:
        """Refuse what no run can be made of.

        Raises:
            SettingsError: naming the option and what it takes.
        """
        if self.template not in TEMPLATES:
            raise SettingsError(f"--template {self.template}: choose {', '.join(TEMPLATES)}.")
        if self.too_long not in TOO_LONG:
            raise SettingsError(f"--too-long {self.too_long}: choose {', '.join(TOO_LONG)}.")
        if self.clock not in CLOCKS:
            raise SettingsError(f"--clock {self.clock}: choose {', '.join(CLOCKS)}.")
        if self.clock == "cpu" and self.device != "cpu":
            raise SettingsError(
                "--clock cpu does not see a device's time: use it with --device cpu."
            )
        if self.dtype not in DTYPES:
            raise SettingsError(f"--dtype {self.dtype}: choose {', '.join(DTYPES)}.")


@dataclass(frozen=True)
class Target:
    """Checkpoints to load, and the names they are reported under."""

    model: str
    drafter: str | None
    name: str
    drafter_name: str


def target_of(asked: Asked) -> Target:
    """The embedded model and its drafter where nothing was named; 'none' is no drafter.

    Raises:
        ModelError: the embedded model is not installed.
    """
    named = None if asked.drafter is None or asked.drafter.lower() == "none" else asked.drafter
    if asked.model is not None:
        return Target(asked.model, named, asked.model, named or "none")
    home = str(embedded.ensure_model())
    if asked.drafter is None and (shipped := embedded.drafter_path()) is not None:
        return Target(home, str(shipped), embedded.SERVED_NAME, shipped.name)
    return Target(home, named, embedded.SERVED_NAME, named or "none")


def load_policies(asked: Asked, target: Target, wanted: Sequence[str]) -> dict[str, Policy]:
    """The policies that the learned methods among ``wanted`` decide by, by label.

    Raises:
        ModelError: a file cannot be read.
        PolicyRefused: a file holds no sound bundle.
    """
    files = methods.policy_files(asked.policies)
    policies = {label: load_policy(path) for label, path in files.items()}
    learned = [name for name in wanted if name.partition(":")[0] in methods.LEARNED]
    unlabelled = any(name.partition(":")[2] not in policies for name in learned)
    if unlabelled and methods.SHIPPED not in policies:
        policies[methods.SHIPPED] = first_policy(ANY_SCOPE)
    return policies


def describe(policy: Policy) -> str:
    """A policy in a few words, for the settings of a run."""
    decided = "live rate" if policy.kind == "survival" else f"threshold {policy.threshold:g}"
    return f"version {policy.version}, {policy.kind}, {decided}, {digest_of(policy)[:12]}"


def settings_of(
    asked: Asked, target: Target, wanted: Sequence[str], policies: dict[str, Policy]
) -> dict[str, Any]:
    """What two runs must share to be one run. JSON-ready."""
    import torch
    import transformers

    return {
        "model": target.name,
        "drafter": target.drafter_name,
        "dtype": asked.dtype,
        "device": _device(asked.device),
        "threads": torch.get_num_threads(),
        "clock": asked.clock,
        "machine": machine.description(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "methods": list(wanted),
        "policies": {f"hybrid:{k}" if k else "hybrid": describe(p) for k, p in policies.items()},
        "prompts": str(asked.prompts) if asked.prompts else "hub",
        "templates": list(TEMPLATES[asked.template]),
        "limit": asked.limit,
        "warmup": asked.warmup,
        "max_tokens": asked.max_tokens,
        "max_prompt_tokens": asked.max_prompt_tokens,
        "too_long": asked.too_long,
    }


def _device(name: str) -> str:
    import torch

    if not name.startswith("cuda"):
        return name
    if not torch.cuda.is_available():
        raise SettingsError(f"--device {name}: this PyTorch finds no CUDA device.")
    return f"{name} ({torch.cuda.get_device_name(name)})"


def folder_of(asked: Asked, settings: dict[str, Any]) -> Path:
    """Where a run is kept: as named, else a folder that its settings give."""
    if asked.out is not None:
        return asked.out
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return FOLDER / f"decode-{digest[:8]}"
