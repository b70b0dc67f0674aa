"""``hvd bench decode``: methods compared prompt by prompt, in one process.

Every method decodes each prompt, in an order that rotates from prompt to prompt; datasets
alternate. Other load on the machine then affects all methods alike. Each method has its own session
and suffix cache for each dataset. Warm-up prompts fill these caches and are not measured.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import HvdError, SettingsError
from decoder.core.costs import LiveCosts
from decoder.policy.first import first_policy
from pipelines import machine
from pipelines.lab.bench import methods
from pipelines.lab.bench.datasets import load
from pipelines.lab.bench.metrics import Key, Measured, Results
from pipelines.lab.bench.options import DecodeOptions
from pipelines.policy.moves import load_policy
from pipelines.prompts import PromptSet, TokenPrompt, fitting, read_folder
from pipelines.reports import Shown, complain
from pipelines.serve.command import ServeOptions, chosen
from pipelines.workloads import prompt_sets

if TYPE_CHECKING:
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.session import Generation, Session
    from pipelines.replay.method import Method

WARM_UP: Final = (32, 8)
"""Prompt and output tokens of each method's first, discarded generation. It pays the one-time costs
of a process: thread pools, allocator, code paths."""
REPORTED: Final = (
    *("hub", "limit", "warmup", "max_prompt_tokens", "too_long", "max_tokens"),
    *("dtype", "clock"),
)
"""Options that the report repeats as they are."""

Tick = Callable[[str], None]


def run(
    engine: ReferenceEngine,
    compared: Sequence[Method],
    sets: Sequence[PromptSet],
    o: DecodeOptions,
    results: Results,
    tick: Tick,
) -> Results:
    """Decode the prompts of ``sets``, alternating between the sets. Mutates ``results``.

    Ctrl-C ends the run early; the results are then marked as interrupted.

    Args:
        tick: called with a description before each generation.
    """
    try:
        costs = warm_up_methods(engine, compared)

        @cache
        def opened(place: int) -> tuple[list[TokenPrompt], dict[str, Session]]:
            return _open(engine, compared, sets[place], costs, o, results, tick)

        for turn, place in itertools.product(range(o.limit), range(len(sets))):
            measured, sessions = opened(place)
            if turn < len(measured):
                at = (turn + place) % len(compared)
                order = [*compared[at:], *compared[:at]]
                _measure(measured[turn], order, sessions, o.max_tokens, results, tick)
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def warm_up_methods(engine: ReferenceEngine, compared: Sequence[Method]) -> dict[str, LiveCosts]:
    """Let every method decode a discarded prompt. Returns a cost profile for each learned method;
    it goes on learning during the run, as in a server."""
    from pipelines.lab.bench.profile import profile
    from pipelines.replay.rivals import deciding

    length, answer = WARM_UP
    prompt = [1 + i % 8 for i in range(length)]
    for method in compared:
        method.session(engine, None, False, *deciding(method)).generate(prompt, answer)
    learned = [m for m in compared if m.policy.kind == "survival" or m.rule is not None]
    return {m.name: profile(engine, m) for m in learned}


def _open(
    engine: ReferenceEngine, compared: Sequence[Method], prompts: PromptSet,
    costs: dict[str, LiveCosts], o: DecodeOptions, results: Results, tick: Tick,
) -> tuple[list[TokenPrompt], dict[str, Session]]:  # fmt: skip
    """The measured prompts of a dataset, and a warmed-up session of each method. A method that
    decides by costs has a server's guards."""
    from pipelines.replay.rivals import deciding

    context = engine.max_model_len
    budget = min(context - o.max_tokens, o.max_prompt_tokens or context)
    fits = fitting(prompts, engine.tokenizer, budget, o.too_long, results.problem)
    usable = list(itertools.islice(fits, o.limit + o.warmup))
    sessions: dict[str, Session] = {}
    for m in compared:
        mine = costs.get(m.name)
        guarded = mine is not None and m.rule is None
        sessions[m.name] = m.session(engine, mine, guarded, *deciding(m))
    for prompt in usable[o.limit :]:
        for name, session in sessions.items():
            tick(f"warming up {prompts.name}: {name}")
            session.generate(list(prompt.ids), o.max_tokens)
    return usable[: o.limit], sessions


def _measure(
    prompt: TokenPrompt, order: Sequence[Method], sessions: dict[str, Session], max_tokens: int,
    results: Results, tick: Tick,
) -> None:  # fmt: skip
    """Decode ``prompt`` by every method; if one fails, the prompt is left out of the results."""
    source = prompt.prompt
    outcomes: dict[str, Generation] = {}
    for method in order:
        tick(f"{source.dataset}: {method.name}")
        try:
            outcomes[method.name] = sessions[method.name].generate(list(prompt.ids), max_tokens)
        except HvdError as error:
            where = f"{source.dataset}: prompt {source.id}"
            results.problem(f"{where} left out, {method.name} failed: {error}")
            return
    results.prompts[Key(source.dataset, source.id)] = Measured(source.family, outcomes)


def launch(o: DecodeOptions, console: Console) -> Results:
    """Load prompts, models and policies as ``o`` says, and run.

    Raises:
        HvdError: a setting, model or method is wrong, or no prompt could be used.
    """
    wanted, problems = methods.names(o.methods), list[str]()
    sets = _prompt_sets(o, problems)
    complain(console, problems)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    import torch

    from pipelines.lab.packed import pack
    from pipelines.lab.reference import load_engine

    if o.threads is not None:
        torch.set_num_threads(o.threads)
    models = chosen(o.model, o.drafter, "", 0, o.dtype)
    files = methods.policy_files(o.policy or ())
    policies = {label: load_policy(path) for label, path in files.items()}
    policies.setdefault(methods.SHIPPED, first_policy(ANY_SCOPE))
    engine = load_engine(models.model, models.drafter, dtype=o.dtype)
    pack(engine)
    if o.clock == "cpu":
        engine.clock = time.process_time  # type: ignore[method-assign]
    k = engine.settings.model_draft_tokens
    compared = methods.build(wanted, policies, engine.head is not None, k)
    settings = _settings(o, models, policies) | {"threads": torch.get_num_threads()}
    results, known = Results(settings, problems=problems), len(problems)
    with Shown(console) as shown:
        left = len(compared) * sum(min(o.limit + o.warmup, len(s.prompts)) for s in sets)
        done = itertools.count()
        shown.step("warming up", 0, left)
        run(engine, compared, sets, o, results, lambda what: shown.step(what, next(done), left))
    complain(console, results.problems[known:])
    if not results.prompts:
        raise SettingsError("no prompt was decoded by every method, so there is nothing to report.")
    return results


def _prompt_sets(o: DecodeOptions, problems: list[str]) -> list[PromptSet]:
    names, count = methods.words(o.datasets), o.limit + o.warmup
    if o.prompts is not None:
        sets = list(read_folder(o.prompts, names, problems))
    else:
        sets = list((load if o.hub else prompt_sets)(names, count, problems))
    if not sets:
        raise SettingsError(f"no dataset is left to measure. {' '.join(problems)}")
    return sets


def _settings(
    o: DecodeOptions, models: ServeOptions, policies: dict[str, Policy]
) -> dict[str, Any]:
    """The settings of a run, for its report."""
    return {name: getattr(o, name) for name in REPORTED} | {
        "folder": str(o.prompts or ("hub" if o.hub else "own workloads")),
        "datasets": methods.words(o.datasets),
        "model": models.served_name or models.model,
        "drafter": models.drafter or "none",
        "machine": machine.description(),
        "versions": machine.versions("torch", "transformers"),
        "methods": list(methods.names(o.methods)),
        "policies": {
            f"hybrid:{label}" if label else "hybrid": methods.describe(policy)
            for label, policy in policies.items()
        },
    }
