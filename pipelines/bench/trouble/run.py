"""What becomes of speed when an arm breaks: ``hvd bench trouble``.

The embedded model decodes its own workloads by every fixed arm and by the hybrid as a server runs
it, prompt by prompt in turn. After a healthy stretch one arm breaks:

=======  ======================================================================================
drafter  the EAGLE3 head's output layer is replaced by random weights: nothing it drafts holds
cache    every cache draft has its tokens changed and keeps its counts: no match continues
batch    many requests at once, on vLLM: see :mod:`pipelines.bench.trouble.saturation`
=======  ======================================================================================

then it is mended. The hybrid has ``SETTLES`` cycles to find out each time; what is measured are the
prompts begun after that, the same for all methods. A share is *typical* when each cycle is given
the median time of its kind over all methods, which a stalled minute cannot move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import SettingsError
from decoder.costs import LiveCosts
from decoder.drafting.drafts import CacheDraft, Limits
from decoder.drafting.suffix import SuffixCache
from decoder.drafting.trees import Tokens
from decoder.engines.reference.method import Method, method
from decoder.engines.reference.packed import pack
from decoder.engines.reference.profile import profile
from decoder.engines.reference.session import Session
from decoder.floor import Floor
from decoder.policy.first import first_policy
from pipelines import embedded, workloads
from pipelines.bench.trouble import saturation
from pipelines.bench.trouble.stretches import (
    PHASES,
    SETTLES,
    TROUBLES,
    Speed,
    Stretch,
    Tick,
    Trouble,
)

if TYPE_CHECKING:
    from decoder.engines.reference.engine import ReferenceEngine

FIXED: Final = ("greedy", "eagle3", "suffix")


class FailingCache(SuffixCache):
    """A suffix cache whose matches never continue while ``failing``."""

    failing = False

    def propose(
        self,
        request: str,
        context: Tokens,
        limit: int,
        limits: Limits | None = None,
        ahead: int = 0,
    ) -> CacheDraft | None:
        """The draft that there is, its tokens changed."""
        draft = super().propose(request, context, limit, limits, ahead)
        if draft is None or not self.failing:
            return draft
        return replace(draft, tokens=[token ^ 1 for token in draft.tokens])


def measure_all(
    arms: Sequence[str],
    measured: int,
    tokens: int,
    threads: int | None,
    crowd: int,
    console: Console,
) -> tuple[list[Stretch], bool]:
    """Break each of ``arms`` in turn; what is there, and whether it went to the end.

    Raises:
        SettingsError: no such arm.
        ModelError: the embedded model or its drafter is not installed.
        ProcessError: a server did not start, or died.
    """
    wanted = [name for name in TROUBLES if name in arms]
    if len(wanted) < len(set(arms)) or not wanted:
        raise SettingsError(f"--arms {','.join(arms)}: choose from {', '.join(TROUBLES)}.")
    found: list[Stretch] = []
    with console.status("") as shown:

        def stretches() -> Iterator[Stretch]:
            if broken := [name for name in wanted if name != "batch"]:
                yield from _in_reference(broken, measured, tokens, threads, shown.update)
            if "batch" in wanted:
                yield from saturation.measure(measured, tokens, crowd, shown.update)

        try:
            for stretch in stretches():
                found.append(stretch)
                said = f"{stretch.trouble} {stretch.phase}: {stretch.share:.2f} of {stretch.best}"
                console.print(said, highlight=False)
        except KeyboardInterrupt:
            return found, False
    return found, True


def _in_reference(
    arms: Sequence[Trouble], measured: int, tokens: int, threads: int | None, tick: Tick
) -> Iterator[Stretch]:
    from decoder.engines.reference.engine import ReferenceEngine

    if threads is not None:
        torch.set_num_threads(threads)
    engine = ReferenceEngine.load(str(embedded.ensure_model()), embedded.ensure_drafter())
    policy = first_policy(ANY_SCOPE)
    for name in arms:
        yield from measure(engine, policy, name, _prompts(engine), measured, tokens, tick)


def measure(
    engine: ReferenceEngine,
    policy: Policy,
    trouble: Trouble,
    asked: Iterator[list[int]],
    measured: int,
    tokens: int,
    tick: Tick,
    settles: int = SETTLES,
) -> Iterator[Stretch]:
    """Break one arm and mend it.

    Args:
        policy: what the hybrid decides by.
        asked: prompts, without end.
        measured: prompts of each phase that count.
        tokens: of an answer, at most.

    Yields:
        a stretch for each of ``PHASES``, as soon as it is known.
    """
    methods = [*(method(name) for name in FIXED), method("hybrid", policy=policy)]
    sessions = {m.name: _session(engine, m) for m in methods}
    for phase in PHASES:
        with _broken(engine, sessions, trouble if phase == "broken" else None):
            speeds = {m.name: Speed() for m in methods}
            settled = turn = 0
            while speeds["hybrid"].prompts < measured:
                prompt, counts = next(asked), settled >= settles
                turned = turn % len(methods)
                for m in [*methods[turned:], *methods[:turned]]:
                    tick(f"{trouble} {phase}: {m.name}")
                    generation = sessions[m.name].generate(prompt, tokens)
                    if counts:
                        decoded, seconds = len(generation.tokens) - 1, generation.decode_us / 1e6
                        speeds[m.name].add(decoded, seconds, cycles=generation.cycles)
                    elif m.name == "hybrid":
                        settled += len(generation.cycles)
                turn += 1
        floor = sessions["hybrid"].router.floor
        assert floor is not None
        yield Stretch(trouble, phase, speeds, settled, floor.in_force, floor.falls)


def _session(engine: ReferenceEngine, m: Method) -> Session:
    cache = FailingCache(m.drafting(engine.settings)) if m.cache else None
    if m.name != "hybrid":
        return Session(engine, m, cache=cache)
    return Session(engine, m, costs=LiveCosts(profile(engine, m)), floor=Floor(True), cache=cache)


def _prompts(engine: ReferenceEngine) -> Iterator[list[int]]:
    for prompt in workloads.interleaved():
        ids: Sequence[int] = engine.tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        if len(ids) < engine.max_model_len // 4:
            yield list(ids)


@contextmanager
def _broken(
    engine: ReferenceEngine, sessions: dict[str, Session], trouble: Trouble | None
) -> Iterator[None]:
    head = engine.head
    assert head is not None
    whole = head.lm_head
    caches = [s.cache for s in sessions.values() if isinstance(s.cache, FailingCache)]
    if trouble == "drafter":
        head.register_module("lm_head", _random_like(engine))
    for cache in caches:
        cache.failing = trouble == "cache"
    try:
        yield
    finally:
        head.register_module("lm_head", whole)
        for cache in caches:
            cache.failing = False


def _random_like(engine: ReferenceEngine) -> nn.Module:
    assert engine.head is not None
    config = engine.head.config
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False))
    pack(layer)
    return layer


def table(stretches: Sequence[Stretch]) -> Table:
    """For a terminal."""
    shown = Table(
        "trouble", "phase", *FIXED, "hybrid", "hybrid / best fixed", "typical",
        "in force at the end",
        title="tokens a second",
    )  # fmt: skip
    for s in stretches:
        rates = [f"{speed.rate:.1f}" for speed in s.speeds.values()]
        typical = "" if s.share_typical is None else f"{s.share_typical:.2f}"
        shown.add_row(s.trouble, s.phase, *rates, f"{s.share:.2f} ({s.best})", typical, s.fallback)
    return shown
