"""Every method of the reference engine writes what the target alone would, token for token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decoder.contracts.bundle import OUTPUTS, Policy
from decoder.contracts.errors import EngineError
from decoder.contracts.features import NUM_FEATURES
from decoder.core.costs import LiveCosts
from decoder.engines.reference.session import Generation, Sampling
from decoder.experiment.interleaver import Interleaver
from decoder.policy.pricing import CostTable
from pipelines.replay.method import Method
from pipelines.replay.rivals import METHODS, method
from tests.engines.tiny import (
    Family,
    all_methods,
    learned_policy,
    session_of,
    tiny_engine,
    tiny_prompt,
    tiny_target,
)

NAMES = tuple(METHODS)
PROMPTS = (2, 5, 2)
TOKENS = 40


def transformers_greedy(family: Family, seed: int, prompt: list[int], tokens: int) -> list[int]:
    """The same model under another loop: transformers' own."""
    out = tiny_target(seed, family).generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("llama", 1), ("qwen3", 2)])
def test_output_equals_target_only_greedy(family: Family, seed: int) -> None:
    engine, prompt = tiny_engine(seed, family), tiny_prompt(seed)
    expected = transformers_greedy(family, seed, prompt, 40)
    for m in all_methods():
        made = session_of(engine, m)[0].generate(prompt, 40)
        assert made.tokens == expected, m.name
        assert made.finish == "length"


def test_output_is_the_same_while_variants_alternate() -> None:
    seed = 0
    engine = tiny_engine(seed)
    hybrid = method("hybrid", policy=learned_policy())
    session, log = session_of(engine, hybrid, guarded=True)
    trial = replace(learned_policy(), role="trial", share=0.2, threshold=0.0)
    names = ("plain", "suffix", "model", "first")
    interleaver = Interleaver(names, 0.8, {"trial": trial}, learned_policy(), seed)
    session.router.interleaver = interleaver
    for number in range(5):
        prompt = tiny_prompt(seed + number)
        expected = transformers_greedy("llama", seed, prompt, 60)
        assert session.generate(prompt, 60).tokens == expected
    assert {e.side for e in log.every} >= {"champion", "trial", *names}
    assert interleaver.rounds_made > 1 and not interleaver.failures


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Generation]]:
    """A few requests of each method, one after the other in one session."""
    engine = tiny_engine(2)
    prompts = [tiny_prompt(seed) for seed in PROMPTS]
    known = [method("greedy").session(engine).generate(p, TOKENS).tokens for p in prompts]
    made: dict[str, list[Generation]] = {}
    for m in all_methods():
        session, _ = session_of(engine, m)
        made[m.name] = [session.generate(p, TOKENS) for p in prompts]
        assert [g.tokens for g in made[m.name]] == known
    return made


def arms(made: list[Generation]) -> set[str]:
    return {c.arm for g in made for c in g.cycles}


def test_methods_use_their_own_arms(runs: dict[str, list[Generation]]) -> None:
    assert arms(runs["greedy"]) == {"none"}
    assert arms(runs["eagle3"]) == {"model", "none"}
    assert arms(runs["suffix"]) == {"cache", "none"}
    for name in ("frequency", "hybrid"):
        assert arms(runs[name]) >= {"cache", "model"}, name
    assert max(c.verified for g in runs["eagle3"] for c in g.cycles) == 4


def test_the_chain_saves_cycles(runs: dict[str, list[Generation]]) -> None:
    cycles = {name: sum(len(g.cycles) for g in made) for name, made in runs.items()}
    assert cycles["eagle3"] < cycles["greedy"]


def test_cycles_account_for_every_token(runs: dict[str, list[Generation]]) -> None:
    for made in runs.values():
        for g in made:
            position = 1  # the prefill's token
            for c in g.cycles:
                assert c.position == position
                assert 0 <= c.accepted <= c.verified
                assert (c.arm == "none") == (c.verified == 0)
                position += c.accepted + 1
            assert position == len(g.tokens) == TOKENS
            assert g.decode_us >= sum(c.us for c in g.cycles)


def test_the_same_seed_gives_the_same_sample_and_another_another() -> None:
    engine, prompt = tiny_engine(1), tiny_prompt(1)
    for m in all_methods():
        draws = [
            session_of(engine, m)[0].generate(prompt, 20, sampling=Sampling(1.0, seed)).tokens
            for seed in (3, 3, 4)
        ]
        assert draws[0] == draws[1] != draws[2], m.name


@pytest.mark.parametrize("m", all_methods(), ids=NAMES)
def test_a_request_ends_at_its_first_stop_id_at_its_limit_and_with_the_context(m: Method) -> None:
    engine, prompt = tiny_engine(2, max_model_len=64), tiny_prompt(2)
    free = transformers_greedy("llama", 2, prompt, 40)
    ends = [(free[: free.index(stop) + 1], stop, 48) for stop in sorted(set(free))[::3]]
    for expected, stop, most in [*ends, *((free[:n], None, n) for n in (1, 3, 100))]:
        session, log = session_of(engine, m)
        made = session.generate(prompt, most, stop_ids=frozenset({stop} - {None}))
        assert (made.tokens, made.finish) == (expected, "length" if stop is None else "stop")
        assert sum(c.accepted for c in made.cycles) + len(made.cycles) + 1 >= len(expected)
        assert session.router.counters.stopped == 1
        assert stop is not None or all(e.censored in ("", "length") for e in log.every)


def test_a_drafter_that_is_always_rejected_changes_no_output() -> None:
    engine, prompt = tiny_engine(3), tiny_prompt(3)
    expected = method("greedy").session(engine).generate(prompt, 40).tokens
    unused = sorted(set(range(12)) - set(expected))
    assert engine.head is not None
    with torch.no_grad():
        engine.head.set_vocabulary(torch.tensor((unused * 8)[:8]).sort().values)
    made = method("eagle3").session(engine).generate(prompt, 40)
    assert made.tokens == expected
    assert sum(c.accepted for c in made.cycles) == 0
    assert all(c.arm == "model" for c in made.cycles[:-1])


def test_later_requests_draft_from_earlier_outputs_of_their_own_tenant_only() -> None:
    engine = tiny_engine(4)
    prompt = [5, 0, 9, 1]

    def cycles(tenants: tuple[str, str]) -> int:
        session = method("suffix").session(engine)
        for tenant in tenants:
            made = session.generate(prompt, 40, tenant=tenant)
        return len(made.cycles)

    assert cycles(("a", "a")) < cycles(("a", "b")) == cycles(("b", "a"))


@pytest.mark.parametrize("model", [False, True])
def test_a_rate_policy_under_live_costs_and_the_floor_is_lossless_too(model: bool) -> None:
    """What a serving worker runs: drafts cut where they stop paying, fixed arms when it loses."""
    # Two tokens are likely to hold, a third is not, and a verified token costs a tenth of a step.
    breaks_off = np.full(OUTPUTS["survival"], 3.0, np.float32)
    breaks_off[:2] = -1.0
    nothing = np.zeros((NUM_FEATURES, len(breaks_off)), np.float32)
    policy = Policy("", 1, 0.0, kind="survival", layers=((nothing, breaks_off),))
    table = CostTable("dear", (1, 101), (1.0, 11.0), draft_us=0.2)
    engine, served = tiny_engine(2), Method("served", policy, model)
    fixed, log = session_of(engine, served, costs=LiveCosts(table, live=False))
    live = served.session(engine, costs=LiveCosts(table), guarded=True)
    for seed in range(2):
        prompt = tiny_prompt(seed)
        expected = method("greedy").session(engine).generate(prompt, 60).tokens
        assert live.generate(prompt, 60).tokens == expected
        assert fixed.generate(prompt, 60).tokens == expected
    assert any(e.arm == "cache" and e.verified_len < e.draft_len for e in log.every)
    assert fixed.router.counters.cycles["cache"] > 5


def test_a_method_with_a_rule_is_refused_without_it() -> None:
    with pytest.raises(EngineError, match="pass it"):
        method("buckets").session(tiny_engine(0))
