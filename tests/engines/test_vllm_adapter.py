"""What the router is told is what really ran, under vLLM's own scheduler and whatever happens."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decoder.core.costs import LiveCosts
from decoder.core.guards.draft_budget import MASK_US
from decoder.policy.pricing import CostTable
from tests.decoder.simulated import waiting
from tests.engines.configs import config
from tests.engines.scheduled import VOCABULARY, Scheduled
from tests.events import KeepingLog

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

LENGTH = 600


@functools.lru_cache
def copying(name: str) -> Sequence[int]:
    """A text that goes on copying from itself, with a slip now and then."""
    rng = np.random.default_rng(int("".join(c for c in name if c.isdecimal())))
    text = rng.integers(2, VOCABULARY, 24).tolist()
    while len(text) < LENGTH:
        start = int(rng.integers(0, len(text) - 12))
        text += [*text[start : start + int(rng.integers(6, 30))], int(rng.integers(2, VOCABULARY))]
    return tuple(text[:LENGTH])


def engine(settings: Any, **rest: Any) -> Scheduled:
    return Scheduled(settings, copying, **rest)


def ask(e: Scheduled, requests: range, most: int = 200, steps: int = 12) -> None:
    """Requests with a prompt of forty tokens and their number, and some steps."""
    for number in requests:
        e.ask(str(number), 40 + number, most)
    e.run(steps)


def serve(e: Scheduled, requests: int = 6) -> None:
    ask(e, range(requests), 120, 10_000)


def is_whole(e: Scheduled) -> None:
    """Every request wrote what its script says, and nothing went wrong on the way."""
    assert e.worker.faults == 0 and not e.worker.router.counters.left_out
    for name, output in e.outputs.items():
        start = 40 + int(name)
        assert output == list(copying(name)[start : start + len(output)]) and output


@pytest.mark.parametrize(
    ("method", "tokens", "longest"),
    [("suffix", None, 24), ("suffix", 5, 5), ("suffix", 64, 64), ("suffix", 100, 64)]
    + [("eagle3", n, n) for n in (1, 3, 16, 64)],
)
def test_no_draft_exceeds_num_speculative_tokens(
    method: str, tokens: int | None, longest: int
) -> None:
    e = engine(config(method, tokens=tokens))
    serve(e)
    is_whole(e)
    assert 0 < e.longest_seen <= longest
    assert {len(s.num_accepted_tokens_per_pos) for s in e.stats} == {tokens or 24}


def drafted(e: Scheduled) -> list[tuple[list[str], list[int], int]]:
    """Note what the router is told after each drafting."""
    told, take = [], e.worker.router.drafted

    def noting(report: Any, lengths: Sequence[int], k: int) -> None:
        told.append((list(report.names), list(lengths), k))
        take(report, lengths, k)

    e.worker.router.drafted = noting  # type: ignore[method-assign]
    return told


def observed(e: Scheduled) -> list[tuple[str, int, int, int]]:
    """Note what the router is told after each verification: name, verified, length, and before."""
    told, take = [], e.worker.router.observe

    def noting(report: Any) -> None:
        rows = report.advanced
        before = rows["length"] - np.diff(rows["end"], prepend=0)
        columns = (rows["verified"].tolist(), rows["length"].tolist(), before.tolist())
        told.extend(zip(report.names, *columns, strict=True))
        take(report)

    e.worker.router.observe = noting  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_drafts_of_all_arms_end_before_min_tokens(method: str) -> None:
    e = engine(config(method))
    told = observed(e)
    for number in range(6):
        e.ask(str(number), 40 + number, 120, min_tokens=50 + number)
    e.run()
    is_whole(e)
    places = [(begins - 40 - int(n), v, 50 + int(n)) for n, v, _, begins in told]
    assert sum(v > 0 for w, v, least in places if w < least) > 6
    assert sum(v > 0 for w, v, least in places if w >= least) > 6
    assert all(w >= least or w + v < least for w, v, least in places)


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, {}),
        ({"max_num_batched_tokens": 20, "max_num_seqs": 3}, {}),  # no room for whole drafts
        ({"max_num_batched_tokens": 20, "max_num_seqs": 3}, {"unknown": True}),
        ({"max_model_len": 100}, {}),  # the context ends
        ({"enable_prefix_caching": False}, {}),
        ({"speculative": {"num_speculative_tokens_per_batch_size": [(1, 2, 9), (3, 99, 1)]}}, {}),
        ({}, {"blocks": 90}),
        ({}, {"grammar": 2}),  # what it cuts is not taken for a rejection
    ],
    ids=["plain", "no room", "nor known", "context ends", "no prefix caching", "by batch size",
         "preempting", "grammar"],
)  # fmt: skip
def test_the_router_gets_the_drafted_and_the_verified_lengths(
    method: str, change: dict[str, Any], more: dict[str, Any]
) -> None:
    e = engine(config(method, tokens=16, **change), blocks=more.get("blocks", 400))
    e.grammar.most = more.get("grammar", e.grammar.most)
    if "unknown" in more:  # the router does not know, so the scheduler cuts
        e.runner.scheduler_config.max_num_scheduled_tokens = 10_000
    verified, told = observed(e), drafted(e)
    serve(e)
    is_whole(e)
    assert [(n, v) for n, v, *_ in verified] == [(n, v) for n, _, v in e.told]
    assert e.worker.router.counters.started == 6 and (e.preemptions > 2) == ("blocks" in more)
    lengths = iter(length for _, lengths, _ in told for length in lengths)
    assert max(lengths) == e.longest_seen > 2 * ("grammar" in more)
    for name, output in e.outputs.items():
        own = [length for n, _, length, _ in verified if n == name]
        assert own == sorted(set(own)) and own[-1] >= 40 + int(name) + len(output)
    cut = [(d, v) for _, d, v in e.told if v < d]
    assert bool(cut) == bool({"unknown", "grammar"} & more.keys())
    if "grammar" in more:
        assert {v for _, v, *_ in verified} == {0, 1, 2}
    offered = [v for _, _, v in e.told if v]
    assert sum(e.worker.router.counters.drafted.values()) == sum(offered)
    if e.placeholders:
        return  # vLLM counts the places that it kept for drafts of a request that it resumed
    assert sum(s.num_drafts for s in e.stats) == len(offered)  # vLLM's own counters stay right
    assert sum(s.num_draft_tokens for s in e.stats) == sum(offered)
    for position in range(16):
        seen = sum(s.num_draft_tokens_per_pos[position] for s in e.stats)
        assert seen == sum(v > position for v in offered)


@functools.lru_cache
def looping(name: str) -> Sequence[int]:
    """A text that says the same again and again: as much is drafted of it as may be."""
    again = np.random.default_rng(int(name)).integers(3, VOCABULARY, 24).tolist()
    return tuple(again * 180)


@pytest.mark.parametrize(
    ("batched", "newcomers", "prompt", "later"),
    [
        (51, 1, 30, 1), (51, 4, 30, 1), (51, 1, 450, 2), (96, 3, 200, 2), (20, 2, 40, 2),
        (4_096, 1, 4_085, 8),
    ],
    ids=["one", "several", "a long one", "several long ones", "hardly any room", "in one step"],
)  # fmt: skip
def test_drafts_do_not_delay_new_requests(
    batched: int, newcomers: int, prompt: int, later: int
) -> None:
    """A step or two later than without drafts it has its first token, however small a step is."""

    def steps(**asked: Any) -> int:
        e = Scheduled(
            config("suffix", tokens=16, max_num_seqs=12, max_num_batched_tokens=batched,
                   enable_chunked_prefill=batched < 4_096, max_model_len=4_096),
            looping, blocks=8_000,
        )  # fmt: skip
        for name in "123":
            e.ask(name, 60, 3_000, **asked)
        e.run(40)
        new = [str(4 + number) for number in range(newcomers)]
        for name in new:
            e.ask(name, prompt, 8, **asked)
        for step in range(200):
            e.run(1)
            if all(e.outputs[name] for name in new):
                assert not asked or not e.longest_seen
                return step
        raise AssertionError("never")

    without = steps(extra_args={"hvd_speculate": "off"})
    assert steps() <= without + later


def test_drafts_under_a_grammar_are_limited_by_the_time_for_its_masks() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    def longest(plain_us: float, grammar: Any) -> int:
        e = engine(config("suffix", tokens=16))
        e.worker.router.interleaver = None
        e.worker.router.costs = LiveCosts(CostTable("t", (1, 64), (plain_us, plain_us)), live=False)
        for number in range(2):
            e.ask(str(number), 40 + number, 120)
            e.scheduler.requests[str(number)].sampling_params.structured_outputs = grammar
        e.run(10)
        longest = e.longest_seen
        e.run()
        is_whole(e)
        return longest

    bound = StructuredOutputsParams(regex=".*")
    assert longest(100.0, None) == longest(100_000.0, bound) == 16
    assert longest(100.0, bound) == int(100.0 / MASK_US) // 2 - 1


@pytest.mark.parametrize(
    ("blocks", "capacity"), [(400, 256), (110, 256), (400, 100)],
    ids=["room", "preempting", "little room"],
)  # fmt: skip
def test_drafter_prefill_covers_blocks_shared_by_prefix_caching(blocks: int, capacity: int) -> None:
    """Turns that go on where an aborted one ended: what was set aside must have been read. With
    little room in the drafter a step full of prompts is read after what waits."""
    e = engine(config(tokens=16), blocks=blocks, capacity=capacity)
    rng = np.random.default_rng(0)
    checked = 0

    def turn(name: str) -> Sequence[int]:
        return copying(name.partition("-")[0])

    e.script = turn
    for number in range(4):
        e.ask(f"{number}-0", 30, 400)
    steps = 299
    for round_ in range(1, steps + 1):
        e.run(1)
        assert e.adapter.deferred is not None
        if not e.adapter.deferred.deferred:
            drafting = [n for n in e.runner.input_batch.req_ids if n in e.runner.requests]
            assert all(e.read_rightly(name) for name in drafting)
            checked += len(drafting)
        alive = [n for n in e.outputs if n not in e.finished and len(e.outputs[n]) > 2]
        if alive and rng.random() < 0.2:
            name = alive[int(rng.integers(len(alive)))]
            e.abort(name)
            number, end = name.partition("-")[0], len(e.prompts[name]) + len(e.outputs[name])
            e.ask(f"{number}-{round_}", end if end < 350 else 30, 400)
    for name in [n for n in e.outputs if n not in e.finished]:
        e.abort(name)
    e.run()
    assert checked > 40 and e.worker.faults == 0
    assert e.drafter.passes < steps, (e.drafter.passes, steps)
    assert e.adapter.deferred is not None and e.adapter.deferred.deferred == 0


def in_pieces(name: str) -> Sequence[int]:
    """Prompts of 1,400 tokens that end as their middle goes, of which the answer is the rest."""
    noise = np.random.default_rng(int(name)).integers(2, VOCABULARY, 1_380).tolist()
    return (*noise, *noise[900:1000])


def test_a_chunked_prompt_is_drafted_from_after_its_prefill() -> None:
    e = Scheduled(config("suffix", max_model_len=1_600, tokens=64), in_pieces)
    e.ask("1", 1_400, 80)
    while not e.outputs["1"]:
        e.step()
        assert "1" in e.worker.router
    e.run()
    assert e.outputs["1"] == list(in_pieces("1")[1_400:]) and e.worker.faults == 0
    assert e.told[0][1:] == (0, 0)
    assert e.told[1][2] > 20, "the first draft behind the first token is the prompt's text"


def test_a_request_aborted_during_prefill_leaves_no_state() -> None:
    e = Scheduled(config("suffix", max_model_len=1_600), in_pieces)
    e.ask("1", 1_400, 80)
    e.run(3)
    e.abort("1")
    e.ask("2", 1_400, 80)
    e.run()
    counters = e.worker.router.counters
    assert e.outputs["2"] == list(in_pieces("2")[1_400:]) and not e.outputs["1"]
    assert (counters.started, counters.stopped) == (2, 2) and not e.worker.faults
    assert not e.worker.router.requests.slots and not waiting(e.worker.router.cache)


class Ticking(SimpleNamespace):
    """A model runner for which time passes, in ``ticks`` us, when our adapter looks at it: once."""

    ticks = 0.0

    @property
    def max_model_len(self) -> int:
        self.ticks += 100.0
        return 512

    @property
    def scheduler_config(self) -> Any:
        self.ticks += 20.0
        return self.scheduler

    @property
    def effective_drafter_max_model_len(self) -> int:
        self.ticks += 3.0
        return 512


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_the_adapters_time_is_counted_as_the_plugins_own(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(config(method, tokens=16))
    given = dict(vars(e.runner), scheduler=e.runner.scheduler_config)
    for name in ("max_model_len", "scheduler_config", "effective_drafter_max_model_len"):
        given.pop(name)
    e.runner = Ticking(**given)
    router = e.worker.router
    router.interleaver, router.requests.sink = None, (sink := KeepingLog())
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0 + e.runner.ticks * 1e-6)
    during, drafting = e.adapter.during_step, e.draft

    def target(exposed: bool) -> None:
        e.runner.ticks += 5_000.0
        during(exposed)

    def drafter(**arguments: Any) -> Any:
        e.runner.ticks += 700.0
        return drafting(**arguments)

    if (deferred := e.adapter.deferred) is not None:
        admit = deferred.admit

        def admitting(*arguments: Any) -> None:
            e.runner.ticks += 40.0
            admit(*arguments)

        monkeypatch.setattr(deferred, "admit", admitting)
    monkeypatch.setattr(e.adapter, "during_step", target)
    e.draft = drafter
    serve(e, requests=2)
    is_whole(e)
    has_model = method == "eagle3"
    own = 100.0 + 20.0 + 3.0 + 40.0 * has_model
    assert np.median(router.counters.own_us) == pytest.approx(own)
    assert np.median(router.counters.exposed_us) == pytest.approx(own)
    took = [event.step_us for event in sink.every]
    assert np.median(took) == pytest.approx(5_000.0 + 700.0 * has_model)
