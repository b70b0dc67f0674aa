"""The run of ``hvd bench decode``: methods against each other, prompt by prompt in one process.

For each prompt every method decodes in turn, in an order that rotates from prompt to prompt, and
the datasets take turns as well, so that whatever else the machine does falls on all of them alike.
A method has a session, and with it a suffix cache, of its own for each dataset. Warm-up prompts
fill those caches and are not measured.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import HvdError, SettingsError
from decoder.core.costs import LiveCosts
from decoder.policy.first import first_policy
from pipelines import machine
from pipelines.lab.bench import methods
from pipelines.lab.bench.datasets import PROMPTS, load
from pipelines.lab.bench.metrics import Key, Measured, Results
from pipelines.policy.moves import load_policy
from pipelines.prompts import PromptSet, TokenPrompt, TooLong, fitting, read_folder
from pipelines.reports import Shown, complain
from pipelines.serve.command import chosen
from pipelines.workloads import prompt_sets

if TYPE_CHECKING:
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.session import Generation, Session
    from pipelines.replay.method import Method

MACHINE_WARM_UP: Final = (32, 8)
"""Prompt and output tokens of the first, discarded generation of each method: it pays for what a
process does once (thread pools, allocator, code paths)."""

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Selection:
    """Which prompts, of a folder, the hub or else the project's own workloads, and how much of
    them; lengths are in tokens."""

    folder: Path | None = None
    hub: bool = False
    datasets: tuple[str, ...] = ()
    limit: int = PROMPTS
    warmup: int = 1
    max_prompt_tokens: int | None = None
    too_long: TooLong = "skip"
    max_tokens: int = 128


@dataclass(frozen=True)
class Engine:
    """The checkpoints, how they are computed, and how that is timed.

    ``model`` None is the embedded one. ``policies`` are ``FILE`` or ``label=FILE``.
    """

    model: str | None = None
    drafter: str | None = None
    policies: tuple[str, ...] = ()
    dtype: str = "float32"
    threads: int | None = None
    clock: Literal["wall", "cpu"] = "wall"


def run(
    engine: ReferenceEngine,
    made: Sequence[Method],
    sets: Sequence[PromptSet],
    selection: Selection,
    results: Results,
    tick: Tick,
) -> Results:
    """Decode every prompt of ``sets``, one of each set in turn.

    Ctrl-C ends it early with what is there and marks the results as interrupted. Mutates
    ``results``.

    Args:
        tick: called before each generation, with what comes next.
    """
    from decoder.engines.reference.session import Session
    from pipelines.replay.rivals import deciding

    context, limit = engine.max_model_len, selection.limit
    room = min(context - selection.max_tokens, selection.max_prompt_tokens or context)
    try:
        costs = warm_up_machine(engine, made)

        @cache
        def opened(place: int) -> tuple[list[TokenPrompt], dict[str, Session]]:
            """Prompts and sessions of a dataset, warmed up; who decides by costs has a server's
            guards."""
            how = room, selection.too_long, results.problem
            fits = fitting(sets[place], engine.tokenizer, *how)
            usable = list(itertools.islice(fits, limit + selection.warmup))
            sessions = dict[str, Session]()
            for m in made:
                mine = costs.get(m.name)
                guarded = mine is not None and m.rule is None
                sessions[m.name] = m.session(engine, mine, guarded, *deciding(m))
            for prompt in usable[limit:]:
                for name, session in sessions.items():
                    tick(f"warming up {sets[place].name}: {name}")
                    session.generate(list(prompt.ids), selection.max_tokens)
            return usable[:limit], sessions

        for turn, place in itertools.product(range(limit), range(len(sets))):
            measured, sessions = opened(place)
            if turn < len(measured):
                at = (turn + place) % len(made)  # the last finds the machine otherwise
                order = [*made[at:], *made[:at]]
                _measure(measured[turn], order, sessions, selection.max_tokens, results, tick)
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def warm_up_machine(engine: ReferenceEngine, made: Sequence[Method]) -> dict[str, LiveCosts]:
    """Let every method decode a little of anything, and forget it.

    Returns:
        a profile for each learned method, which goes on learning from the run as in a server.
    """
    from pipelines.lab.bench.profile import profile
    from pipelines.replay.rivals import deciding

    length, answer = MACHINE_WARM_UP
    prompt = [1 + i % 8 for i in range(length)]
    for method in made:
        method.session(engine, None, False, *deciding(method)).generate(prompt, answer)
    learned = [m for m in made if m.policy.kind == "survival" or m.rule is not None]
    return {m.name: profile(engine, m) for m in learned}


def _measure(
    prompt: TokenPrompt,
    order: Sequence[Method],
    sessions: dict[str, Session],
    max_tokens: int,
    results: Results,
    tick: Tick,
) -> None:
    """``prompt`` by every method; nothing is kept of one that some method could not decode."""
    source = prompt.prompt
    outcomes: dict[str, Generation] = {}
    for method in order:
        tick(f"{source.dataset}: {method.name}")
        session = sessions[method.name]
        try:
            made = session.generate(list(prompt.ids), max_tokens)
        except HvdError as error:
            where = f"{source.dataset}: prompt {source.id}"
            results.problem(f"{where} left out, {method.name} failed: {error}")
            return
        outcomes[method.name] = made
    results.prompts[Key(source.dataset, source.id)] = Measured(source.family, outcomes)


def launch(wanted: Sequence[str], selection: Selection, named: Engine, console: Console) -> Results:
    """Run the methods called ``wanted``.

    Raises:
        HvdError: a setting, model or method is wrong, or no prompt at all could be used.
    """
    problems, many = list[str](), selection.limit + selection.warmup
    if selection.folder is not None:
        sets = list(read_folder(selection.folder, selection.datasets, problems))
    elif selection.hub:
        sets = list(load(selection.datasets, many, problems))
    else:
        sets = list(prompt_sets(selection.datasets, many, problems))
    if not sets:
        raise SettingsError(f"no dataset is left to measure. {' '.join(problems)}")
    complain(console, problems)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    import torch

    from pipelines.lab.packed import pack
    from pipelines.lab.reference import load_engine

    if named.threads is not None:
        torch.set_num_threads(named.threads)
    found = chosen(named.model, named.drafter, "", 0, named.dtype)
    policies = {k: load_policy(path) for k, path in methods.policy_files(named.policies).items()}
    if methods.SHIPPED not in policies:
        policies[methods.SHIPPED] = first_policy(ANY_SCOPE)
    settings = {
        **asdict(named),
        **asdict(selection),
        "folder": str(selection.folder or ("hub" if selection.hub else "own workloads")),
        "model": found.served_name or found.model,
        "drafter": found.drafter or "none",
        "threads": torch.get_num_threads(),
        "machine": machine.description(),
        "versions": machine.versions("torch", "transformers"),
        "methods": list(wanted),
        "policies": {
            f"hybrid:{k}" if k else "hybrid": methods.describe(p) for k, p in policies.items()
        },
    }
    engine = load_engine(found.model, found.drafter, dtype=named.dtype)
    pack(engine)
    if named.clock == "cpu":
        engine.clock = time.process_time  # type: ignore[method-assign]
    k = engine.settings.model_draft_tokens
    made = methods.build(wanted, policies, engine.head is not None, k)
    results, told = Results(settings, problems=problems), len(problems)
    with Shown(console) as shown:
        left = len(made) * sum(min(many, len(s.prompts)) for s in sets)
        begun = itertools.count()
        shown.step("warming up", 0, left)
        run(
            engine, made, sets, selection, results, lambda what: shown.step(what, next(begun), left)
        )
    complain(console, results.problems[told:])
    if not results.prompts:
        raise SettingsError("no prompt was decoded by every method, so there is nothing to report.")
    return results
