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
from functools import cache
from typing import TYPE_CHECKING, Final

from decoder.contracts.errors import HvdError
from decoder.contracts.events import DraftEvent
from decoder.core.router import Committed, RequestOptions
from pipelines.lab.bench.options import Selection
from pipelines.lab.bench.results import Cycle, Key, Labelled, Measured, Outcome, Results
from pipelines.prompts import PromptSet, TokenPrompt, fitting

if TYPE_CHECKING:
    from decoder.core.costs import LiveCosts
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
    """One dataset: its prompts, and what decodes them."""

    measured: list[TokenPrompt]
    sessions: dict[str, Session]


def rotated(methods: Sequence[Method], index: int) -> list[Method]:
    """The order of prompt ``index``: greedy first where an oracle has to know its output."""
    turn = index % len(methods)
    order = [*methods[turn:], *methods[:turn]]
    if any(m.oracle for m in methods):
        order.sort(key=lambda m: m.name != "greedy")
    return order


def run(
    engine: ReferenceEngine, sets: Sequence[PromptSet], plan: Plan, results: Results, tick: Tick
) -> Results:
    """Decode every prompt of ``sets``, one of each set in turn.

    Ctrl-C ends it early with what is there and marks the results as interrupted; when the plan's
    minutes are over it ends after the prompt under way. Mutates ``results``.

    Args:
        tick: called before each generation, with what comes next.
    """
    selection = plan.selection
    ends = time.monotonic() + 60 * plan.minutes if plan.minutes else None
    context = engine.max_model_len
    room = min(context - plan.max_tokens, selection.max_prompt_tokens or context)
    try:
        costs = warm_up_machine(engine, plan)

        @cache
        def opened_at(place: int) -> Lane:
            how = room, selection.too_long, results.problem
            fits = fitting(sets[place], engine.tokenizer, *how)
            return open_lane(engine, fits, plan, costs)

        for turn, place in itertools.product(range(selection.limit), range(len(sets))):
            lane = opened_at(place)
            if turn >= len(lane.measured):
                continue
            if ends is not None and time.monotonic() > ends:
                results.out_of_time = True
                break
            order = rotated(plan.methods, turn + place)
            _measure(lane.measured[turn], order, lane.sessions, plan, results, tick)
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def warm_up_machine(engine: ReferenceEngine, plan: Plan) -> dict[str, LiveCosts]:
    """Let every method decode a little of anything, and forget it.

    Returns:
        a profile for each learned method, which goes on learning from the run as in a server.
    """
    from decoder.core.costs import LiveCosts
    from decoder.engines.reference.profile import profile
    from decoder.engines.reference.session import Session

    length, answer = MACHINE_WARM_UP
    prompt, output = [1 + i % 8 for i in range(length)], None
    for method in rotated(plan.methods, 0):
        known = output if method.oracle else None
        output = Session(engine, method).generate(prompt, answer, known=known).tokens
    learned = [m for m in plan.methods if m.policy.kind == "survival" or m.rule is not None]
    return {m.name: LiveCosts(profile(engine, m)) for m in learned}


def open_lane(
    engine: ReferenceEngine, prompts: Iterator[TokenPrompt], plan: Plan, costs: dict[str, LiveCosts]
) -> Lane:
    """Prompts and sessions of a dataset, warmed up."""
    limit = plan.selection.limit
    usable = list(itertools.islice(prompts, limit + plan.selection.warmup))
    sessions = {m.name: opened(engine, m, costs.get(m.name)) for m in plan.methods}
    fallback = next(iter(sessions.values()))
    decoding = next((s for s in sessions.values() if not s.method.cache), fallback)
    for prompt in usable[limit:]:
        tokens = decoding.generate(list(prompt.ids), plan.max_tokens).tokens
        for session in sessions.values():
            if session is not decoding:
                remember(session, prompt.ids, tokens, plan.max_tokens)
    return Lane(usable[:limit], sessions)


def opened(engine: ReferenceEngine, method: Method, costs: LiveCosts | None) -> Session:
    """A session of ``method``; one that decides by costs has the floor that a server gives it."""
    from decoder.core.guards.floor import Floor
    from decoder.engines.reference.session import Session

    served = costs is not None and method.rule is None
    return Session(engine, method, costs, Floor(method.model != "none") if served else None)


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
    results: Results,
    tick: Tick,
) -> None:
    """``prompt`` by every method; nothing is kept of one that some method could not decode."""
    source, outcomes = prompt.prompt, dict[str, Outcome]()
    for method in order:
        tick(f"{source.dataset}: {method.name}")
        session = sessions[method.name]
        before = len(session.sink)
        known = list(outcomes["greedy"].tokens) if method.oracle else None
        try:
            made = session.generate(list(prompt.ids), plan.max_tokens, known=known)
        except HvdError as error:
            where = f"{source.dataset}: prompt {source.id}"
            results.problem(f"{where} left out, {method.name} failed: {error}")
            return
        outcomes[method.name] = outcome_of(method.name, made, session.sink[before:])
    facts = source.family, len(prompt.ids), prompt.cut
    key = Key(source.dataset, source.id)
    results.prompts[key] = Measured(key, *facts, outcomes)


def outcome_of(method: str, made: Generation, events: Sequence[DraftEvent]) -> Outcome:
    """The record that is kept of one generation, whose cycles had ``events``."""
    cycles = [
        Cycle(
            c.arm, c.cache_len, c.verified, c.accepted, round(c.draft_us, 1), round(c.verify_us, 1)
        )
        for c in made.cycles
    ]
    drafts = [Labelled(e.predicted, e.accepted, bool(e.censored)) for e in events if e.draft_len]
    times = made.prefill_us, made.decode_us
    return Outcome(method, tuple(made.tokens), tuple(cycles), *times, tuple(drafts))
