"""One ``hvd bench decode``: from what a person asked for to results."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import SettingsError
from decoder.policy.first import first_policy
from pipelines import machine
from pipelines.lab.bench import methods
from pipelines.lab.bench.datasets import load
from pipelines.lab.bench.decode.run import Plan, run
from pipelines.lab.bench.options import Engine, Options, Selection
from pipelines.lab.bench.render import complain
from pipelines.lab.bench.results import Results
from pipelines.policy.bundles import load_policy
from pipelines.progress import Shown
from pipelines.prompts import PromptSet, read_folder
from pipelines.serve.command import chosen

if TYPE_CHECKING:
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.method import Method


def prompt_sets(selection: Selection, problems: list[str]) -> list[PromptSet]:
    """The datasets asked for, local or from the hub.

    Raises:
        SettingsError: there is none, the folder is none, or the ``datasets`` library is missing.
    """
    if selection.folder is not None:
        found = list(read_folder(selection.folder, selection.datasets, problems))
    else:
        found = list(load(selection.datasets, selection.limit + selection.warmup, problems))
    if not found:
        raise SettingsError(f"no dataset is left to measure. {' '.join(problems)}")
    return found


def launch(options: Options, console: Console) -> Results:
    """Run it.

    Raises:
        HvdError: a setting, model or method is wrong, or no prompt at all could be used.
    """
    selection, problems = options.selection, list[str]()
    sets = prompt_sets(selection, problems)
    complain(console, problems)
    prepared = prepare(options, options.methods)
    results = Results(prepared.settings, problems=problems)
    told = len(problems)
    plan = Plan(prepared.methods, selection, options.max_tokens, options.minutes)
    with Shown(console) as shown:
        drawn = sum(min(selection.limit, len(s.prompts)) for s in sets)
        left = drawn * len(options.methods)
        begun = itertools.count()
        shown.step("warming up", 0, left)
        run(prepared.engine, sets, plan, results, lambda what: shown.step(what, next(begun), left))
    complain(console, results.problems[told:])
    if not results.prompts:
        raise SettingsError("no prompt was decoded by every method, so there is nothing to report.")
    return results


@dataclass(frozen=True)
class Prepared:
    """What a run decodes with, and its ``settings``, JSON-ready."""

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
    named, selection = options.engine, options.selection
    if named.threads is not None:
        torch.set_num_threads(named.threads)
    device = named.device
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise SettingsError(f"--device {device}: this PyTorch finds no CUDA device.")
        device += f" ({torch.cuda.get_device_name(device)})"
    found = chosen(named.model, named.drafter, "", 0, named.dtype)
    policies = _policies(named, wanted)
    settings = {
        **asdict(named),
        **asdict(selection),
        "folder": str(selection.folder or "hub"),
        "model": found.served_name or found.model,
        "drafter": found.drafter or "none",
        "device": device,
        "threads": torch.get_num_threads(),
        "machine": machine.description(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "methods": list(wanted),
        "policies": {
            f"hybrid:{k}" if k else "hybrid": methods.describe(p) for k, p in policies.items()
        },
        "max_tokens": options.max_tokens,
    }
    engine = ReferenceEngine.load(
        found.model, found.drafter, dtype=named.dtype, device=named.device
    )
    if named.clock == "cpu":
        engine.clock = time.process_time  # type: ignore[method-assign]
    k = engine.settings.model_draft_tokens
    return Prepared(engine, methods.build(wanted, policies, engine.has_drafter, k), settings)


def _policies(named: Engine, wanted: Sequence[str]) -> dict[str, Policy]:
    """Those named, by label, and the first one if any of ``wanted`` needs it."""
    policies = {k: load_policy(path) for k, path in methods.policy_files(named.policies).items()}
    if methods.SHIPPED not in policies and {*methods.LEARNED} & {n.split("@")[0] for n in wanted}:
        policies[methods.SHIPPED] = first_policy(ANY_SCOPE)
    return policies
