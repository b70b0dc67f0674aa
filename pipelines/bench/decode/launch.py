"""One ``hvd bench decode``: from what a person asked for to results on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import SettingsError
from decoder.policy.first import first_policy
from pipelines import embedded, machine
from pipelines.bench import methods
from pipelines.bench.datasets import SOURCES, load
from pipelines.bench.decode.run import Plan, run
from pipelines.bench.metrics import differing
from pipelines.bench.options import Engine, Options, Selection
from pipelines.bench.results import Results, Store
from pipelines.policy.bundles import load_policy
from pipelines.progress import Shown
from pipelines.prompts import PromptSet, read_folder

if TYPE_CHECKING:
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.method import Method

FOLDER: Final = Path("reports/bench")


def prompt_sets(selection: Selection, problems: list[str]) -> list[PromptSet]:
    """The datasets asked for, local or from the hub, in the paper's order.

    Raises:
        SettingsError: the folder is none, or the ``datasets`` library is missing.
    """
    if selection.folder is not None:
        found = list(read_folder(selection.folder, selection.datasets, problems))
    else:
        count = selection.limit + selection.warmup
        found = list(load(selection.datasets, count, problems))
    order = list(SOURCES)
    return sorted(found, key=lambda s: order.index(s.name) if s.name in order else len(order))


def launch(options: Options, console: Console) -> tuple[Results, Path]:
    """Run it; what is measured is on disk as soon as it is known.

    Returns:
        the results, and the folder that holds them.

    Raises:
        HvdError: a setting, model or method is wrong, or no prompt at all could be used.
    """
    selection, problems = options.selection, list[str]()
    wanted = methods.names(options.methods)
    sets = prompt_sets(selection, problems)
    _complain(console, problems)
    if not sets:
        raise SettingsError("no dataset is left to measure; the lines above say why.")
    prepared = prepare(options, wanted)
    folder = options.out
    if folder is None:  # one that the settings give
        digest = hashlib.sha256(json.dumps(prepared.settings, sort_keys=True).encode()).hexdigest()
        folder = FOLDER / f"decode-{digest[:8]}"
    store = Store(folder / "generations.jsonl", prepared.settings, options.fresh)
    for problem in problems:
        store.problem(problem)
    told = len(store.results.problems)
    plan = Plan(prepared.methods, selection, options.max_tokens, options.minutes)
    with Shown(console) as shown:
        drawn = sum(min(selection.limit, len(s.prompts)) for s in sets) * len(selection.templates)
        left = max(0, drawn - len(store.results.whole())) * len(wanted)
        begun = itertools.count()
        shown.step("warming up", 0, left)

        def tick(what: str) -> None:
            shown.step(what, next(begun), left)

        results = run(prepared.engine, sets, plan, store, tick)
    _complain(console, results.problems[told:])
    if not results.whole():
        raise SettingsError("no prompt was decoded by every method, so there is nothing to report.")
    return results, folder


def _complain(console: Console, problems: Sequence[str]) -> None:
    for problem in problems:
        console.print(f"[yellow]{escape(problem)}[/yellow]", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Prepared:
    """What a run decodes with; ``settings`` are what two runs must share to be one, JSON-ready."""

    engine: ReferenceEngine
    methods: tuple[Method, ...]
    settings: dict[str, Any]


def prepare(options: Options, wanted: Sequence[str]) -> Prepared:
    """Load the checkpoints and make the methods called ``wanted``.

    Raises:
        HvdError: a model, method or policy is missing or does not fit.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    import torch
    import transformers

    from decoder.engines.reference.engine import ReferenceEngine

    transformers.utils.logging.disable_progress_bar()
    asked, selection = options.engine, options.selection
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    model, drafter = _checkpoints(asked)
    policies = _policies(asked, wanted)
    settings = {
        "model": asked.model or embedded.SERVED_NAME,
        "drafter": _drafter_name(asked, drafter),
        "dtype": asked.dtype,
        "device": _device(asked.device),
        "threads": torch.get_num_threads(),
        "clock": asked.clock,
        "machine": machine.description(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "methods": list(wanted),
        "policies": {
            f"hybrid:{k}" if k else "hybrid": methods.describe(p) for k, p in policies.items()
        },
        "prompts": str(selection.folder) if selection.folder else "hub",
        "templates": list(selection.templates),
        "limit": selection.limit,
        "warmup": selection.warmup,
        "max_tokens": options.max_tokens,
        "max_prompt_tokens": selection.max_prompt_tokens,
        "too_long": selection.too_long,
    }
    engine = ReferenceEngine.load(model, drafter, dtype=asked.dtype, device=asked.device)
    if asked.clock == "cpu":
        engine.clock = time.process_time  # type: ignore[method-assign]
    k = engine.settings.model_draft_tokens
    return Prepared(engine, methods.build(wanted, policies, engine.has_drafter, k), settings)


def _checkpoints(asked: Engine) -> tuple[str, str | None]:
    """Target and drafter: the embedded ones where nothing was named; 'none' is no drafter."""
    named = None if asked.drafter is None or asked.drafter.lower() == "none" else asked.drafter
    if asked.model is not None:
        return asked.model, named
    home, shipped = str(embedded.ensure_model()), embedded.drafter_path()
    return home, str(shipped) if asked.drafter is None and shipped is not None else named


def _drafter_name(asked: Engine, drafter: str | None) -> str:
    if drafter is None or asked.drafter is not None:
        return drafter or "none"
    return Path(drafter).name


def _policies(asked: Engine, wanted: Sequence[str]) -> dict[str, Policy]:
    """By label, those that the learned methods among ``wanted`` decide by."""
    policies = {k: load_policy(path) for k, path in methods.policy_files(asked.policies).items()}
    learned = [name for name in wanted if name.partition(":")[0] in methods.LEARNED]
    unlabelled = any(name.partition(":")[2] not in policies for name in learned)
    if unlabelled and methods.SHIPPED not in policies:
        policies[methods.SHIPPED] = first_policy(ANY_SCOPE)
    return policies


def _device(name: str) -> str:
    import torch

    if not name.startswith("cuda"):
        return name
    if not torch.cuda.is_available():
        raise SettingsError(f"--device {name}: this PyTorch finds no CUDA device.")
    return f"{name} ({torch.cuda.get_device_name(name)})"


def proven(results: Results, console: Console) -> bool:
    """Say on ``console`` over how much every output equals greedy's; whether that was shown."""
    whole, compared = results.whole(), results.settings["methods"]
    if "greedy" not in compared:
        console.print("[red]--check compares with greedy: name it among --methods.[/red]")
        return False
    wrong = {s.split(" of ")[0] for s in differing(results)}
    families = {results.prompts[key].family for key in whole}
    said = "every output equals greedy's." if not wrong else f"{len(wrong)} outputs differ."
    console.print(
        f"{len(whole)} prompts of {len(families)} families, {len(compared)} methods: {said}",
        highlight=False,
    )
    return not wrong
