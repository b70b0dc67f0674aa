"""The run of ``hvd bench decode``: methods against each other, prompt by prompt in one process.

For each prompt every method decodes in turn, in an order that rotates from prompt to prompt, and
the datasets take turns as well, so that whatever else the machine does falls on all of them alike.
A method has a session, and with it a suffix cache, of its own for each dataset. Warm-up prompts
fill those caches and are not measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from decoder.contracts.errors import HvdError
from decoder.contracts.events import DraftEvent
from decoder.router import Committed, RequestOptions
from pipelines.bench.options import Selection
from pipelines.bench.results import Cycle, Key, Labelled, Outcome, PromptFacts, Results, Store
from pipelines.prompts import PromptSet, TokenPrompt, fitting

if TYPE_CHECKING:
    from decoder.costs import LiveCosts
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.generation import Generation
    from decoder.engines.reference.method import Method
    from decoder.engines.reference.session import Session

MACHINE_WARM_UP: Final = (32, 8)
"""Prompt and output tokens of the first, discarded generation of each method: it pays for what a
process does once (thread pools, allocator, code paths)."""

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to run on each dataset. Lengths are in tokens; ``minutes`` None is without end."""

    methods: tuple[Method, ...]
    selection: Selection
    max_tokens: int = 128
    minutes: float | None = None


@dataclass(frozen=True)
class Lane:
    """One dataset in one template: its prompts, and what decodes them."""

    measured: tuple[TokenPrompt, ...]
    sessions: dict[str, Session]


def rotated(methods: Sequence[Method], index: int) -> list[Method]:
    """The order of prompt ``index``: greedy first where an oracle has to know its output."""
    turn = index % len(methods)
    order = [*methods[turn:], *methods[:turn]]
    if any(m.oracle for m in methods):
        order.sort(key=lambda m: m.name != "greedy")
    return order


def run(
    engine: ReferenceEngine, sets: Sequence[PromptSet], plan: Plan, store: Store, tick: Tick
) -> Results:
    """Decode every prompt of ``sets`` that ``store`` does not hold yet, one of each set in turn.

    Ctrl-C ends it early with what is there and marks the results as interrupted; when the plan's
    minutes are over it ends after the prompt under way.

    Args:
        tick: called before each generation, with what comes next.
    """
    results, selection = store.results, plan.selection
    ends = time.monotonic() + 60 * plan.minutes if plan.minutes else None
    try:
        costs = warm_up_machine(engine, plan)
        lanes: dict[int, Lane] = {}
        pairs = [(found, template) for found in sets for template in selection.templates]
        for turn in range(selection.limit):
            for place, (found, template) in enumerate(pairs):
                if place not in lanes:
                    fits = fitting(found, engine.tokenizer, template, room(engine, plan),
                                   selection.too_long, store.problem)  # fmt: skip
                    lanes[place] = open_lane(engine, fits, plan, results, costs)
                lane = lanes[place]
                if turn >= len(lane.measured) or known(lane.measured[turn], results):
                    continue
                if ends is not None and time.monotonic() > ends:
                    results.out_of_time = True
                    return results
                order = rotated(plan.methods, turn + place)
                _measure(lane.measured[turn], order, lane.sessions, plan, store, tick)
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def room(engine: ReferenceEngine, plan: Plan) -> int:
    """Prompt tokens that leave place for the output in the model's context."""
    context = engine.max_model_len
    return min(context - plan.max_tokens, plan.selection.max_prompt_tokens or context)


def known(prompt: TokenPrompt, results: Results) -> bool:
    """Whether every method of the run has decoded ``prompt`` already."""
    return set(results.settings["methods"]) <= set(results.outcomes.get(key_of(prompt), {}))


def key_of(prompt: TokenPrompt) -> Key:
    """How the results name ``prompt``."""
    return Key(prompt.prompt.dataset, prompt.template, prompt.prompt.id)


def warm_up_machine(engine: ReferenceEngine, plan: Plan) -> dict[str, LiveCosts]:
    """Let every method decode a little of anything, and forget it.

    Returns:
        a profile for each learned method, which goes on learning from the run as in a server.
    """
    from decoder.costs import LiveCosts
    from decoder.engines.reference.profile import profile
    from decoder.engines.reference.session import Session

    length, answer = MACHINE_WARM_UP
    output: list[int] | None = None
    for method in rotated(plan.methods, 0):
        session = Session(engine, method)
        generation = session.generate(
            [1 + i % 8 for i in range(length)], answer, known=output if method.oracle else None
        )
        output = generation.tokens
    learned = [m for m in plan.methods if m.policy.kind == "survival" or m.rule is not None]
    return {m.name: LiveCosts(profile(engine, m)) for m in learned}


def open_lane(
    engine: ReferenceEngine,
    prompts: Iterator[TokenPrompt],
    plan: Plan,
    results: Results,
    costs: dict[str, LiveCosts],
) -> Lane:
    """Prompts and sessions of a dataset: warmed up, and brought to where an earlier run stopped."""
    limit = plan.selection.limit
    usable = list(itertools.islice(prompts, limit + plan.selection.warmup))
    measured, spare = tuple(usable[:limit]), usable[limit:]
    sessions = {m.name: opened(engine, m, costs.get(m.name)) for m in plan.methods}
    done = [p for p in measured if known(p, results)]
    if len(done) < len(measured):
        plain = next((s for s in sessions.values() if not s.method.cache), None)
        decoding = plain or next(iter(sessions.values()))
        for prompt in spare:
            tokens = decoding.generate(list(prompt.ids), plan.max_tokens).tokens
            for session in sessions.values():
                if session is not decoding:
                    remember(session, prompt.ids, tokens, plan.max_tokens)
        for prompt in done:
            for name, outcome in results.outcomes[key_of(prompt)].items():
                remember(sessions[name], prompt.ids, outcome.tokens, plan.max_tokens)
    return Lane(measured, sessions)


def opened(engine: ReferenceEngine, method: Method, costs: LiveCosts | None) -> Session:
    """A session of ``method``; one that decides by costs has the floor that a server gives it."""
    from decoder.engines.reference.session import Session
    from decoder.floor import Floor

    served = costs is not None and method.rule is None
    floor = Floor(method.model != "none") if served else None
    return Session(engine, method, costs=costs, floor=floor)


def remember(
    session: Session, prompt: Sequence[int], tokens: Sequence[int], max_tokens: int
) -> None:
    """Let a session's caches see a generation token by token, without decoding it.

    Mutates the session's router; the events of the walk are dropped, and so are its step times (a
    step of 0 tokens is none that a cost table learns from).
    """
    if not session.method.cache:
        return
    import numpy as np

    context, name = session.engine.max_model_len, "remembered"
    before = len(session.sink)
    session.router.start(name, np.asarray(prompt, np.int32), RequestOptions(max_tokens, context))
    for token in tokens:
        session.router.observe([Committed(name, [token], 0)], step_tokens=0)
        session.router.choose([name])
    session.router.stop(name, "stop")
    del session.sink[before:]


def _measure(
    prompt: TokenPrompt,
    order: Sequence[Method],
    sessions: dict[str, Session],
    plan: Plan,
    store: Store,
    tick: Tick,
) -> None:
    """``prompt`` by every method; nothing is kept of one that some method could not decode."""
    outcomes: list[Outcome] = []
    output: list[int] | None = None
    for method in order:
        tick(f"{prompt.prompt.dataset}: {method.name}")
        session = sessions[method.name]
        before = len(session.sink)
        try:
            generation = session.generate(
                list(prompt.ids), plan.max_tokens, known=output if method.oracle else None
            )
        except HvdError as error:
            where = f"{prompt.prompt.dataset}: prompt {prompt.prompt.id}"
            store.problem(f"{where} left out, {method.name} failed: {error}")
            return
        if method.name == "greedy":
            output = generation.tokens
        found = session.sink[before:]
        outcomes.append(outcome_of(key_of(prompt), method.name, generation, found))
    source = prompt.prompt
    store.prompt(
        PromptFacts(key_of(prompt), source.family, source.standin_for, len(prompt.ids), prompt.cut)
    )
    for outcome in outcomes:
        store.outcome(outcome)


def outcome_of(
    key: Key, method: str, generation: Generation, events: Sequence[DraftEvent]
) -> Outcome:
    """The record that is kept of one generation, whose cycles had ``events``."""
    cycles = (
        Cycle(c.arm, c.cache_len, c.verified, c.accepted, round(c.draft_us, 1),
              round(c.verify_us, 1))
        for c in generation.cycles
    )  # fmt: skip
    return Outcome(
        key,
        method,
        tuple(generation.tokens),
        tuple(cycles),
        generation.finish,
        generation.prefill_us,
        generation.decode_us,
        tuple(Labelled(e.predicted, e.accepted, bool(e.censored)) for e in events if e.draft_len),
        tuple(
            Labelled(e.predicted_model, e.model_accepted, False)
            for e in events
            if e.model_accepted is not None
        ),
    )
