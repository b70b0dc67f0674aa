"""One ``hvd bench decode``: from what a person asked for to results, tables and files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from decoder.contracts.errors import SettingsError
from pipelines import embedded, machine
from pipelines.bench import methods
from pipelines.bench.datasets import PROMPTS, SOURCES, load
from pipelines.bench.decode import Plan, run
from pipelines.bench.metrics import differing
from pipelines.bench.prompts import PromptSet, Template, TooLong, read_folder
from pipelines.bench.results import Results, Store

if TYPE_CHECKING:
    from decoder.contracts.policy import Policy
    from decoder.engines.method import Method
    from decoder.engines.reference import ReferenceEngine

FOLDER: Final = Path("reports/bench")
GENERATIONS: Final = "generations.jsonl"
DTYPES: Final = ("float32", "bfloat16", "float16")
TOO_LONG: Final[dict[str, TooLong]] = {"skip": "skip", "truncate": "truncate"}
TEMPLATES: Final[dict[str, tuple[Template, ...]]] = {
    "chat": ("chat",),
    "none": ("none",),
    "both": ("chat", "none"),
}


def parts(text: str) -> tuple[str, ...]:
    """The names in ``text``, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


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

    def __post_init__(self) -> None:
        """Refuse what no run can be made of.

        Raises:
            SettingsError: naming the option and what it takes.
        """
        if self.template not in TEMPLATES:
            raise SettingsError(f"--template {self.template}: choose {', '.join(TEMPLATES)}.")
        if self.too_long not in TOO_LONG:
            raise SettingsError(f"--too-long {self.too_long}: choose {', '.join(TOO_LONG)}.")
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
        ModelError: a file cannot be read, or none ships for this target.
        PolicyRefused: a file holds no sound bundle.
    """
    files = methods.policy_files(asked.policies)
    policies = {label: methods.load_policy(path) for label, path in files.items()}
    learned = [name for name in wanted if name.partition(":")[0] in methods.LEARNED]
    unlabelled = any(name.partition(":")[2] not in policies for name in learned)
    if unlabelled and methods.SHIPPED not in policies:
        policies[methods.SHIPPED] = methods.shipped_policy(target.model, target.drafter)
    return policies


def describe(policy: Policy) -> str:
    """A policy in a few words, for the settings of a run."""
    parameter = "rate" if policy.kind == "survival" else "threshold"
    value = policy.rate if policy.kind == "survival" else policy.threshold
    return f"version {policy.version}, {policy.kind}, {parameter} {value:g}"


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


def prompt_sets(asked: Asked, problems: list[str]) -> list[PromptSet]:
    """The datasets asked for, local or from the hub.

    Raises:
        SettingsError: the folder is none, or the ``datasets`` library is missing.
    """
    if asked.prompts is not None:
        found = list(read_folder(asked.prompts, asked.datasets, problems))
    else:
        found = list(load(asked.datasets, asked.limit + asked.warmup, problems))
    order = list(SOURCES)
    return sorted(found, key=lambda s: order.index(s.name) if s.name in order else len(order))


def launch(asked: Asked, console: Console) -> tuple[Results, Path]:
    """Run it; what is measured is on disk as soon as it is known.

    Returns:
        the results, and the folder that holds them.

    Raises:
        HvdError: a setting, model or method is wrong, or no prompt at all could be used.
    """
    wanted = methods.names(asked.methods)
    problems: list[str] = []
    sets = prompt_sets(asked, problems)
    for problem in problems:
        console.print(f"[yellow]{escape(problem)}[/yellow]", highlight=False, soft_wrap=True)
    if not sets:
        raise SettingsError("no dataset is left to measure; the lines above say why.")
    target = target_of(asked)
    engine, made, settings = prepare(asked, target, wanted)
    folder = folder_of(asked, settings)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    store = Store(folder / GENERATIONS, settings, began, asked.fresh)
    reported = len(store.results.problems)
    for problem in problems:
        store.problem(problem)
        reported += 1
    plan = Plan(
        made,
        TEMPLATES[asked.template],
        asked.limit,
        asked.warmup,
        asked.max_tokens,
        asked.max_prompt_tokens,
        TOO_LONG[asked.too_long],
        asked.minutes,
    )
    with _progress(console) as bar:
        drawn = sum(min(plan.limit, len(found.prompts)) for found in sets) * len(plan.templates)
        left = max(0, drawn - len(store.results.whole()))
        task = bar.add_task("warming up", total=left * len(made))

        def tick(what: str) -> None:
            bar.update(task, description=escape(what))
            bar.advance(task)

        results = run(engine, sets, plan, store, tick)
    for problem in results.problems[reported:]:
        console.print(f"[yellow]{escape(problem)}[/yellow]", highlight=False, soft_wrap=True)
    if not results.whole():
        raise SettingsError("no prompt was decoded by every method, so there is nothing to report.")
    return results, folder


def prepare(
    asked: Asked, target: Target, wanted: Sequence[str]
) -> tuple[ReferenceEngine, tuple[Method, ...], dict[str, Any]]:
    """Engine, methods and settings of a run.

    Raises:
        HvdError: a model, method or policy is missing or does not fit.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    import torch
    import transformers

    from decoder.engines.reference import ReferenceEngine

    transformers.utils.logging.disable_progress_bar()
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    policies = load_policies(asked, target, wanted)
    settings = settings_of(asked, target, wanted, policies)
    engine = ReferenceEngine.load(
        target.model, target.drafter, dtype=asked.dtype, device=asked.device
    )
    k = engine.settings.model_draft_tokens
    return engine, methods.build(wanted, policies, engine.has_drafter, k), settings


def write_json(summary: dict[str, Any], path: Path) -> None:
    """Write the figures to ``path``.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--json {path} cannot be written: {error}.") from error


def proven(results: Results, console: Console) -> bool:
    """Say on ``console`` over how much every output equals greedy's; whether that was shown."""
    whole = results.whole()
    if "greedy" not in results.settings["methods"]:
        console.print("[red]--check compares with greedy: name it among --methods.[/red]")
        return False
    wrong = {s.split(" of ")[0] for s in differing(results)}
    families = {results.prompts[key].family for key in whole}
    console.print(
        f"{len(whole)} prompts of {len(families)} families, "
        f"{len(results.settings['methods'])} methods: "
        + ("every output equals greedy's." if not wrong else f"{len(wrong)} outputs differ."),
        highlight=False,
    )
    return not wrong


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
