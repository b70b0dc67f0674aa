"""``hvd bench decide --whole``: all that is ours in a vLLM step of 64 requests.

Real suffix trees, the shipped network, and the adapter that vLLM calls, with all that it asks of
the router: observe, choose, drafted, settle. The text is made up, but copies as agents' text does:
a stretch in three comes from the request's own prompt or from what others of its tenant wrote.
Times are of the deciding thread: processor time, which other programs on the machine do not enter,
and beside it the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from rich.table import Table

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import EngineError
from decoder.contracts.features import TOKEN_CLASSES
from decoder.costs import LiveCosts
from decoder.drafting.suffix import SuffixCache
from decoder.engines.vllm.adapter import Adapter
from decoder.floor import Floor
from decoder.labels import common_prefix
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from decoder.router import DraftRouter
from decoder.settings import WorkerSettings
from decoder.telemetry.queue import EventQueue

T = TypeVar("T")

ADAPTER: Final = "adapter"
DRAFTED: Final = -1
"""A token of a model draft."""
BATCH: Final = 64
VOCABULARY: Final = 49_152
LONGEST: Final = 64
PROMPTS: Final = (1_000, 32_000)
"""Tokens of the prompts; the longer ones come while the others decode."""
COPIED: Final = 0.35
SHARED: Final = 0.15
"""Chance that a stretch is copied from the request's own text, or from the tenant's pool."""
STRETCH: Final = (20.0, 8.0)
"""Mean tokens of a copied stretch, and of a new one."""
CHANCE: Final = 0.5
"""That a token of a model draft is accepted, given those before it."""
STEPS: Final = 400
SETTLED: Final = 40
"""Steps before the first that counts."""
OUTPUT: Final = 1_200
"""Tokens of an answer; one that is done makes room for another request."""
LONG_PROMPTS: Final = 7
LONG_STEPS: Final = 140
"""Long prompts, one after the other, and steps beside each: it must be indexed by then."""


@dataclass(frozen=True)
class Whole:
    """Microseconds a request of a step of ``BATCH``, of the deciding thread's processor time.

    ``exposed`` is what a GPU would wait for: all but :meth:`DraftRouter.settle`.
    ``longest_wait_for_a_prompt_ms`` is the longest that a step waited while a prompt of 32k tokens
    was begun and indexed beside it, the median over such prompts.
    """

    step_us_per_request_batch64: float
    p99: float
    exposed_us_per_request: float
    exposed_share: float
    clock_us_per_request: float
    us_by_verb: dict[str, float]
    longest_wait_for_a_prompt_ms: float
    prompt_us_per_token: float
    tokens_per_cycle: float
    steps: int

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return asdict(self)


_WEIGHTS: Final = np.cumsum(1.0 / (np.arange(VOCABULARY) + 2.7))
_SHARES: Final = _WEIGHTS / _WEIGHTS[-1]
"""Up to and including each token, as words fall in text (Zipf and Mandelbrot)."""


class Writer:
    """Makes up texts of one tenant."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._pool = self._new(20_000)

    def text(self, tokens: int) -> list[int]:
        """A text of so many tokens that copies from itself and from the tenant's pool."""
        rng, text = self._rng, self._new(200)
        while len(text) < tokens:
            draw = rng.random()
            copied, new = (1 + int(rng.geometric(1.0 / mean)) for mean in STRETCH)
            if draw < COPIED + SHARED:
                source = text if draw < COPIED else self._pool
                begin = int(rng.integers(0, max(len(source) - copied, 1)))
                text += source[begin : begin + copied]
            else:
                text += self._new(new)
        return text[:tokens]

    def _new(self, tokens: int) -> list[int]:
        found: list[int] = np.searchsorted(_SHARES, self._rng.random(tokens)).tolist()
        return found


class _Clock:
    """Microseconds of each part of a step, of this thread's processor time and of the clock: of
    what is timed within another part, that has no share."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.wall = 0.0
        self._within = 0.0

    def timed(self, part: str, call: Callable[..., T]) -> Callable[..., T]:
        """``call``, its time booked as ``part``."""

        def called(*args: Any, **kwargs: Any) -> T:
            before, self._within = self._within, 0.0
            wall, own = time.perf_counter(), time.thread_time()
            made = call(*args, **kwargs)
            took = (time.thread_time() - own) * 1e6
            self.parts[part] = self.parts.get(part, 0.0) + took - self._within
            self._within = before + took
            self.wall += (time.perf_counter() - wall) * 1e6 * (part == ADAPTER)
            return made

        return called


class Took(NamedTuple):
    """Microseconds of a step: of processor time by part, and of the clock."""

    parts: dict[str, float]
    wall: float


class _Engine:
    """What the adapter sees of a vLLM whose requests go on as is known beforehand.

    It is vLLM's model runner and scheduler output in one; drafts of the model are of ``DRAFTED``.
    """

    def __init__(self, policy: Policy, writer: Writer, seed: int) -> None:
        settings = WorkerSettings.load()
        self.router, self.clock = make_router(policy), _Clock()
        worker: Any = SimpleNamespace(router=self.router, settings=settings, faults=0)
        self.worker, self.adapter = worker, Adapter(worker, LONGEST, has_model=True)
        for verb in ("observe", "choose", "drafted", "settle"):
            timed = self.clock.timed(verb, getattr(self.router, verb))
            setattr(self.router, verb, timed)
        for call in ("before_step", "during_step", "propose"):
            setattr(self.adapter, call, self.clock.timed(ADAPTER, getattr(self.adapter, call)))
        self._writer, self._rng = writer, np.random.default_rng(seed)
        self._texts: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}
        self.tokens = self.cycles = 0
        self.requests: dict[str, Any] = {}
        self.names: list[str] = []  # of the batch, in its order
        self.input_batch = SimpleNamespace(
            req_ids=self.names, vocab_size=VOCABULARY, token_ids_cpu=list[Any]()
        )
        self.max_model_len = self.effective_drafter_max_model_len = 1 << 20
        self.device = SimpleNamespace(type="cuda")  # which does not wait for what settles
        self.scheduler_config = SimpleNamespace(
            max_num_scheduled_tokens=1 << 14, enable_chunked_prefill=True
        )
        self.finished_req_ids: set[str] = set()
        self.num_spec_tokens_to_schedule = LONGEST
        self.scheduled_spec_decode_tokens: dict[str, list[int]] = {}
        self.num_scheduled_tokens: dict[str, int] = {}
        self.total_num_scheduled_tokens = 0

    def begin(self, name: str, prompt: int, output: int, place: int | None = None) -> None:
        """Add a request with so many tokens, in the place of another that ends."""
        text = self._writer.text(prompt + output)
        parameters = SimpleNamespace(
            extra_args=None,
            stop_token_ids=None,
            eos_token_id=None,
            max_tokens=output,
            min_tokens=0,
            thinking_token_budget=None,
        )
        self._texts[name] = text
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=text[:prompt], output_token_ids=[], sampling_params=parameters,
            prompt_embeds=None, prompt_is_token_ids=None, lora_request=None, num_tokens=prompt,
        )  # fmt: skip
        ids = np.array(text[:prompt], np.int32)
        if place is None:
            self.names.append(name)
            self.input_batch.token_ids_cpu.append(ids)
            return
        self.input_batch.token_ids_cpu[place] = ids
        self.finished_req_ids.add(self.names[place])
        del self.requests[self.names[place]], self._texts[self.names[place]]
        self.names[place] = name

    def step(self) -> Took:
        """One step; its times."""
        clock = self.clock
        clock.parts, clock.wall = {}, 0.0
        drafts = {name: self._drafts.get(name, []) for name in self.names}
        self.adapter.before_step(self, self)
        self.finished_req_ids = set()
        self.adapter.during_step(self)
        sampled = [self._verify(name, draft) for name, draft in drafts.items()]
        self.scheduled_spec_decode_tokens = {n: [0] * len(draft) for n, draft in drafts.items()}
        self.num_scheduled_tokens = {n: 1 + len(draft) for n, draft in drafts.items()}
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())
        self.num_spec_tokens_to_schedule = LONGEST
        made = self.adapter.propose(self, self, sampled, self._draft)
        if self.worker.faults:
            raise EngineError("a step failed: see the log.")
        self._drafts = dict(zip(self.names, made, strict=True))
        return Took(clock.parts, clock.wall)

    def left(self, name: str) -> int:
        """Tokens of its text still to come."""
        return len(self._texts[name]) - int(self.requests[name].num_tokens)

    def _verify(self, name: str, draft: Sequence[int]) -> list[int]:
        """What a step commits of a request."""
        state, text = self.requests[name], self._texts[name]
        done = state.num_tokens
        if draft and draft[0] == DRAFTED:
            held = self._rng.random(len(draft)) < CHANCE
            accepted = len(draft) if held.all() else int(held.argmin())
        else:
            accepted = common_prefix(draft, text[done : done + len(draft)])
        committed = text[done : done + accepted + 1]
        state.output_token_ids += committed
        state.num_tokens += len(committed)
        self.tokens, self.cycles = self.tokens + len(committed), self.cycles + 1
        return committed

    def _draft(self) -> torch.Tensor:
        return torch.full((len(self.names), self.num_spec_tokens_to_schedule), DRAFTED)


def make_router(policy: Policy) -> DraftRouter:
    """A worker's router with a drafter, at costs that stay as they are."""
    rng = np.random.default_rng(1)
    classes = (rng.random((VOCABULARY, len(TOKEN_CLASSES))) < 0.2).astype(np.float32)
    # Flat to some 250 tokens, then steep: a GPU's step, where drafting for 64 requests still pays.
    costs = CostTable("bench", (1, 256, 4096), (5e3, 5.5e3, 9e4), 200.0, 300.0)
    return DraftRouter(
        SuffixCache(WorkerSettings.load()), policy, classes, EventQueue(0), True,
        longest=LONGEST, costs=LiveCosts(costs, live=False), floor=Floor(True),
    )  # fmt: skip


def measure(
    steps: int = STEPS,
    seed: int = 0,
    *,
    settled: int = SETTLED,
    long_prompts: int = LONG_PROMPTS,
    long_steps: int = LONG_STEPS,
) -> Whole:
    """Decode for ``steps`` steps behind the first ``settled``; then let ``long_prompts`` come, one
    after the other, with ``long_steps`` steps beside each."""
    short, long = PROMPTS
    engine = _Engine(first_policy(ANY_SCOPE), Writer(seed), seed)
    for i in range(BATCH):
        engine.begin(f"request-{i}", short, OUTPUT)
    clocks = []
    for step in range(settled + steps):
        clock = engine.step()
        if step >= settled:
            clocks.append(clock)
        _renew(engine)
    whole = np.array([sum(c.parts.values()) for c in clocks])
    settling = np.array([c.parts["settle"] for c in clocks])
    tokens_per_cycle = engine.tokens / engine.cycles
    waits, per_token = _long_prompts(engine, long, long_prompts, long_steps)
    middle = {v: float(np.median([c.parts[v] for c in clocks])) / BATCH for v in clocks[0].parts}
    return Whole(
        float(np.median(whole)) / BATCH,
        float(np.percentile(whole, 99)) / BATCH,
        float(np.median(whole - settling)) / BATCH,
        float(1.0 - settling.sum() / whole.sum()),
        float(np.median([c.wall for c in clocks])) / BATCH,
        middle,
        waits,
        per_token,
        tokens_per_cycle,
        steps,
    )


def _renew(engine: _Engine) -> None:
    """Put new requests in the places of those that are done. Mutates."""
    for place, name in enumerate(engine.names):
        if engine.left(name) <= LONGEST:
            engine.begin(f"again-{engine.cycles}-{place}", PROMPTS[0], OUTPUT, place)


def _long_prompts(engine: _Engine, tokens: int, prompts: int, steps: int) -> tuple[float, float]:
    """Longest that a step waits for a prompt's sake, ms, median over prompts; and us a token.

    What is timed is beginning the request and the slices in which its prompt is indexed.
    """
    router, cache, own = engine.router, engine.router.cache, time.thread_time
    index, start, longest, spent = cache.index, router.start, [], []
    slices = list[float]()

    def timed(call: Callable[..., T]) -> Callable[..., T]:
        def called(*args: Any) -> T:
            began = own()
            made = call(*args)
            slices.append(own() - began)
            return made

        return called

    cache.index, router.start = timed(index), timed(start)  # type: ignore[method-assign]
    for i in range(prompts):
        slices.clear()
        engine.begin(f"long-{i}", tokens, steps * LONGEST, i)
        for _ in range(steps):
            engine.step()
            _renew(engine)
        longest.append(max(slices))
        spent.append(sum(slices))
    cache.index, router.start = index, start  # type: ignore[method-assign]
    return float(np.median(longest)) * 1e3, float(np.median(spent)) / tokens * 1e6


def table(whole: Whole) -> Table:
    """For a terminal."""
    shown = Table("what", "us a request", title=f"a step of {BATCH} requests, all that is ours")
    shown.add_row("whole, median", f"{whole.step_us_per_request_batch64:.1f}")
    shown.add_row("whole, p99", f"{whole.p99:.1f}")
    shown.add_row("exposed (all but settle)", f"{whole.exposed_us_per_request:.1f}")
    for verb, us in whole.us_by_verb.items():
        shown.add_row(f"  {verb}", f"{us:.1f}")
    shown.add_row(
        "longest wait for a prompt of 32k, ms", f"{whole.longest_wait_for_a_prompt_ms:.2f}"
    )
    return shown
