"""``hvd bench decide``: the time of this project's code in a vLLM step.

It runs the suffix cache, the shipped network and the adapter that vLLM calls, with the router's
verbs: observe, choose, drafted, flush. The text is synthetic but copies like agents' text: half of
its passages repeat the request's own text or its tenant's. Times are processor time of the deciding
thread, and wall clock beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import EngineError
from decoder.contracts.features import TOKEN_CLASSES
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.router import DraftRouter, RequestOptions
from decoder.drafting.suffix import SuffixCache
from decoder.drafting.windows import BITS, END, PAGE, Pool
from decoder.engines.vllm.adapter import Adapter
from decoder.engines.vllm.v1 import runner as v1
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from decoder.settings import WorkerSettings
from pipelines.replay.cache_drafts import common_prefix
from pipelines.stats import median

T = TypeVar("T")

DRAFTED: Final = -1  # a token of a model draft
VOCABULARY: Final = 49_152
LONGEST: Final = 64
LONG_PROMPT: Final = 32_000  # tokens of a prompt that arrives while the others decode
OUTPUT: Final = 1_200  # tokens of an answer
COPIED: Final = 0.35
SHARED: Final = 0.15
"""Probability that a passage copies the request's own text, or the tenant's pool."""
PASSAGE: Final = (20.0, 8.0)  # mean tokens of a copied passage, and of a new one
CHANCE: Final = 0.5  # probability that a token of a model draft is accepted, given those before it
WARM_UP_STEPS: Final = 40
BESIDE: Final = 140  # steps beside each long prompt; its indexing takes fewer
CACHE_BYTES: Final = 64 << 20  # bytes written to evict the processor's caches

_WEIGHTS: Final = np.cumsum(1.0 / (np.arange(VOCABULARY) + 2.7))
_SHARES: Final = _WEIGHTS / _WEIGHTS[-1]
"""Cumulative token frequencies, distributed as words are (Zipf-Mandelbrot)."""


class Batch(NamedTuple):
    """The requests of a step: how many, tokens of each prompt, and whether texts repeat two
    tokens."""

    requests: int = 64
    prompt: int = 1_000
    loops: bool = False


BATCH: Final = Batch()


class Writer:
    """Generates the texts of one tenant."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._pool = self._new(20_000)

    def text(self, tokens: int, loops: bool = False) -> list[int]:
        """A text that copies from itself and from the tenant's pool; with ``loops`` it repeats two
        tokens."""
        if loops:
            return (self._new(2) * tokens)[:tokens]
        rng, text = self._rng, self._new(200)
        while len(text) < tokens:
            draw = rng.random()
            copied, new = (1 + int(rng.geometric(1.0 / mean)) for mean in PASSAGE)
            if draw < COPIED + SHARED:
                source = text if draw < COPIED else self._pool
                begin = int(rng.integers(0, max(len(source) - copied, 1)))
                text += source[begin : begin + copied]
            else:
                text += self._new(new)
        return text[:tokens]

    def _new(self, tokens: int) -> list[int]:
        ids: list[int] = np.searchsorted(_SHARES, self._rng.random(tokens)).tolist()
        return ids


class Clock:
    """Exclusive processor time of this thread by part, in microseconds, and the wall clock of the
    outermost parts."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.wall = self._within = 0.0
        self._depth = 0

    def timed(self, part: str, call: Callable[..., T]) -> Callable[..., T]:
        """``call``, timed as ``part``."""

        def called(*args: Any, **kwargs: Any) -> T:
            before, self._within, self._depth = self._within, 0.0, self._depth + 1
            wall, own = time.perf_counter(), time.thread_time()
            result = call(*args, **kwargs)
            took = (time.thread_time() - own) * 1e6
            self.parts[part] = self.parts.get(part, 0.0) + took - self._within
            self._within, self._depth = before + took, self._depth - 1
            self.wall += (time.perf_counter() - wall) * 1e6 * (not self._depth)
            return result

        return called


class Engine:
    """A simulated vLLM: model runner and scheduler output in one. Requests follow known texts; a
    model draft consists of ``DRAFTED``."""

    def __init__(self, batch: Batch) -> None:
        self._prompt, self._loops = batch.prompt, batch.loops
        self.router = make_router(first_policy(ANY_SCOPE))
        settings = WorkerSettings.load()
        worker: Any = SimpleNamespace(router=self.router, settings=settings, faults=0)
        self.worker, self.adapter = worker, Adapter(worker, LONGEST, has_model=True)
        self.begin_step, self.propose = v1.begin_step, v1.propose
        self._writer, self._rng = Writer(0), np.random.default_rng(0)
        self._texts: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}
        self.tokens = self.cycles = 0
        self.requests: dict[str, Any] = {}
        self.names: list[str] = []  # of the batch, in its order
        self.input_batch = SimpleNamespace(
            req_ids=self.names,
            vocab_size=VOCABULARY,
            token_ids_cpu=list[Any](),
            num_tokens_no_spec=np.zeros(batch.requests, np.int32),
        )
        self.max_model_len = self.effective_drafter_max_model_len = 1 << 20
        self.scheduler_config = SimpleNamespace(
            max_num_scheduled_tokens=1 << 14, enable_chunked_prefill=True
        )
        self.finished_req_ids: set[str] = set()
        self.num_spec_tokens_to_schedule = LONGEST
        self.scheduled_spec_decode_tokens: dict[str, list[int]] = {}
        self.num_scheduled_tokens: dict[str, int] = {}
        self.total_num_scheduled_tokens = 0
        for place in range(batch.requests):
            self.begin(f"request-{place}", batch.prompt, OUTPUT)

    def begin(self, name: str, prompt: int, output: int, place: int | None = None) -> None:
        """Add a request; with ``place`` it replaces the one there."""
        text = self._texts[name] = self._writer.text(prompt + output, self._loops)
        unset = ["extra_args", "stop_token_ids", "eos_token_id", "thinking_token_budget"]
        sampling = SimpleNamespace(**dict.fromkeys(unset), max_tokens=output, min_tokens=0)
        unset = ["prompt_embeds", "prompt_is_token_ids", "lora_request"]
        self.requests[name] = SimpleNamespace(
            **dict.fromkeys(unset),
            prompt_token_ids=text[:prompt],
            output_token_ids=[],
            sampling_params=sampling,
            num_tokens=prompt,
        )
        ids = np.array(text[:prompt], np.int32)
        if place is None:
            self.names.append(name)
            self.input_batch.token_ids_cpu.append(ids)
            return
        self.input_batch.token_ids_cpu[place] = ids
        self.finished_req_ids.add(self.names[place])
        del self.requests[self.names[place]], self._texts[self.names[place]]
        self.names[place] = name

    def step(self) -> None:
        """Run one step, then replace finished requests."""
        drafts = {name: self._drafts.get(name, []) for name in self.names}
        self.begin_step(self.adapter, self)
        self.finished_req_ids = set()
        self.adapter.during_step(exposed=False)
        sampled = [self._verify(name, draft) for name, draft in drafts.items()]
        self.scheduled_spec_decode_tokens = {n: [0] * len(draft) for n, draft in drafts.items()}
        self.num_scheduled_tokens = {n: 1 + len(draft) for n, draft in drafts.items()}
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())
        self.num_spec_tokens_to_schedule = LONGEST
        self.input_batch.num_tokens_no_spec[:] = [
            self.requests[name].num_tokens for name in self.names
        ]
        drafts_now = self.propose(self.adapter, self, self, sampled, self._draft)
        if self.worker.faults:
            raise EngineError("a step failed: see the log.")
        self._drafts = dict(zip(self.names, drafts_now, strict=True))
        for place, name in enumerate(self.names):
            if len(self._texts[name]) - int(self.requests[name].num_tokens) <= LONGEST:
                self.begin(f"again-{self.cycles}-{place}", self._prompt, OUTPUT, place)

    def _verify(self, name: str, draft: Sequence[int]) -> list[int]:
        """The tokens that a step commits to a request."""
        state, text = self.requests[name], self._texts[name]
        done = state.num_tokens
        if draft and draft[0] == DRAFTED:
            hits = self._rng.random(len(draft)) < CHANCE
            accepted = len(draft) if hits.all() else int(hits.argmin())
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
    """A worker's router with a drafter and fixed costs."""
    rng = np.random.default_rng(1)
    classes = (rng.random((VOCABULARY, len(TOKEN_CLASSES))) < 0.2).astype(np.float32)
    # a GPU's step: flat up to some 250 tokens, then steep
    table = CostTable("bench", (1, 256, 4096), (5e3, 5.5e3, 9e4), 200.0, 300.0)
    settings = WorkerSettings.load()
    router = DraftRouter(
        SuffixCache(settings), policy, classes, Sink(None), model_len=settings.model_draft_tokens,
        longest=LONGEST, guarded=True,
    )  # fmt: skip
    router.costs = LiveCosts(table, live=False)
    return router


def measure(
    steps: int, long_prompts: int, beside: int = BESIDE, batch: Batch = BATCH
) -> dict[str, Any]:
    """Time ``steps`` steps, then half as many with the processor's caches evicted before each, then
    ``long_prompts`` prompts of 32k tokens, each beside ``beside`` steps.

    Returns:
        JSON-ready figures: microseconds a request, processor time of the deciding thread.
        ``exposed`` is what delays a GPU: all but :meth:`DraftRouter.flush`. ``cold`` is the whole
        step with evicted caches. ``longest_wait_for_a_prompt_ms`` is the longest delay of a step by
        a long prompt, the median over prompts; None without any.
    """
    engine, clock, n = Engine(batch), Clock(), batch.requests
    for verb in ("observe", "choose", "drafted", "flush"):
        setattr(engine.router, verb, clock.timed(verb, getattr(engine.router, verb)))
    for owner, call in (
        (engine, "begin_step"), (engine.adapter, "during_step"), (engine, "propose"),
    ):  # fmt: skip
        setattr(owner, call, clock.timed("adapter", getattr(owner, call)))
    parts, walls = _steps(engine, clock, WARM_UP_STEPS + steps)
    parts, walls = parts[WARM_UP_STEPS:], walls[WARM_UP_STEPS:]
    us = {verb: np.array([p[verb] for p in parts]) / n for verb in parts[0]}
    whole = np.sum([*us.values()], axis=0)
    tokens_per_cycle = engine.tokens / engine.cycles
    cold, _ = _steps(engine, clock, steps // 2, np.zeros(CACHE_BYTES, np.uint8))
    assert engine.router.cache is not None
    bytes_per_token = engine.router.cache.held_bytes / _tokens(engine.router.cache.pool)
    longest, spent = _long_prompts(engine, long_prompts, beside)
    return {
        f"step_us_per_request_batch{n}": float(np.median(whole)),
        "p99": float(np.percentile(whole, 99)),
        "cold_us_per_request": float(np.median([sum(p.values()) for p in cold])) / n,
        "exposed_us_per_request": float(np.median(whole - us["flush"])),
        "exposed_share": float(1.0 - us["flush"].sum() / whole.sum()),
        "clock_us_per_request": float(np.median(walls)) / n,
        "us_by_verb": {verb: float(np.median(each)) for verb, each in us.items()},
        "longest_wait_for_a_prompt_ms": longest and longest * 1e3,
        "prompt_us_per_token": spent and spent / LONG_PROMPT * 1e6,
        "bytes_per_token": float(bytes_per_token),
        "tokens_per_cycle": tokens_per_cycle,
        "steps": steps,
    }


def memory(outputs: int, requests: int, prompt: int) -> dict[str, Any]:
    """Memory that a worker uses for one tenant's text.

    Args:
        outputs: output tokens of the tenant's earlier requests.
        requests, prompt: running requests, and tokens of each prompt.

    Returns:
        JSON-ready figures: as the worker accounts for it (``HVD_WORKER_CACHE_GIB`` bounds that),
        and as the process grows.
    """
    router, writer, mine = make_router(first_policy(ANY_SCOPE)), Writer(0), psutil.Process()
    cache, none, before = router.cache, np.zeros(0, np.int32), mine.memory_info().rss
    assert cache is not None
    for place in range(-(-outputs // OUTPUT)):
        cache.start(f"past-{place}", none, "tenant")
        cache.extend(f"past-{place}", writer.text(OUTPUT))
        cache.stop(f"past-{place}")
    options = RequestOptions(OUTPUT, prompt + OUTPUT, tenant="tenant")
    for place in range(requests):
        router.start(f"request-{place}", np.array(writer.text(prompt), np.int32), options)
        cache.index(None)
    held, grown = cache.held_bytes, mine.memory_info().rss - before
    tokens = -(-outputs // OUTPUT) * OUTPUT + requests * prompt
    return {
        "tokens": tokens,
        "held_mib": held / 2**20,
        "bytes_per_token": held / tokens,
        "rss_grown_mib": grown / 2**20,
        "rss_mib": mine.memory_info().rss / 2**20,
        "pages_evicted": cache.evicted + cache.shed,
    }


def _tokens(pool: Pool) -> int:
    """Number of tokens in all windows."""
    windows, tokens = pool.windows[pool.windows["mask"] > 0], 0
    for window in windows:
        offsets = (np.arange(window["first"], window["end"]) - PAGE) & window["mask"]
        blocks = window["blocks"][np.ceil(np.log2((offsets >> BITS) + 1)).astype(int)]
        text = pool.text[blocks.astype(np.int64) * PAGE + offsets]
        tokens += int(np.count_nonzero(text != END))
    return tokens


def _steps(
    engine: Engine, clock: Clock, steps: int, caches: NDArray[np.uint8] | None = None
) -> tuple[list[dict[str, float]], list[float]]:
    """Times of steps, by part and by the wall clock; ``caches`` is written over before each."""
    parts, walls = list[dict[str, float]](), list[float]()
    for _ in range(steps):
        if caches is not None:
            caches += 1
        clock.parts, clock.wall = {}, 0.0
        engine.step()
        parts.append(clock.parts)
        walls.append(clock.wall)
    return parts, walls


def _long_prompts(engine: Engine, prompts: int, beside: int) -> tuple[float | None, float | None]:
    """Longest delay of a step by a long prompt, and the prompt's total cost: seconds, medians over
    prompts. They cover starting the request and the slices in which its prompt is indexed."""
    slices, waits, costs = list[float](), list[float](), list[float]()

    def timed(call: Callable[..., T]) -> Callable[..., T]:
        def called(*args: Any) -> T:
            began = time.thread_time()
            result = call(*args)
            slices.append(time.thread_time() - began)
            return result

        return called

    for owner, name in ((engine.router.cache, "index"), (engine.router, "start")):
        setattr(owner, name, timed(getattr(owner, name)))
    for place in range(prompts):
        slices.clear()
        engine.begin(f"long-{place}", LONG_PROMPT, beside * LONGEST, place % len(engine.names))
        for _ in range(beside):
            engine.step()
        waits.append(max(slices))
        costs.append(sum(slices))
    return median(waits), median(costs)
