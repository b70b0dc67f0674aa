"""One ``hvd bench decode``: from what a person asked for to results on disk."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import SettingsError
from pipelines.bench import methods
from pipelines.bench.asked import (
    TEMPLATES,
    TOO_LONG,
    Asked,
    Target,
    folder_of,
    load_policies,
    settings_of,
    target_of,
)
from pipelines.bench.datasets import SOURCES, load
from pipelines.bench.decode.run import Plan, run
from pipelines.bench.metrics import differing
from pipelines.bench.results import Results, Store
from pipelines.progress import Shown
from pipelines.prompts import PromptSet, read_folder

if TYPE_CHECKING:
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.method import Method

GENERATIONS: Final = "generations.jsonl"


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
    with Shown(console) as shown:
        drawn = sum(min(plan.limit, len(found.prompts)) for found in sets) * len(plan.templates)
        left = max(0, drawn - len(store.results.whole())) * len(made)
        begun = itertools.count()
        shown.step("warming up", 0, left)

        def tick(what: str) -> None:
            shown.step(what, next(begun), left)

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

    from decoder.engines.reference.engine import ReferenceEngine

    transformers.utils.logging.disable_progress_bar()
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    policies = load_policies(asked, target, wanted)
    settings = settings_of(asked, target, wanted, policies)
    engine = ReferenceEngine.load(
        target.model, target.drafter, dtype=asked.dtype, device=asked.device
    )
    if asked.clock == "cpu":
        engine.clock = time.process_time  # type: ignore[method-assign]
    k = engine.settings.model_draft_tokens
    return engine, methods.build(wanted, policies, engine.has_drafter, k), settings


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
