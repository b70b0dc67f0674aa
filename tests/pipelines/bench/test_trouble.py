"""The benchmark that breaks an arm: it breaks what it says, measures all alike, and mends it."""

from __future__ import annotations

import itertools
import os
import sys

import numpy as np
import pytest
import torch

from decoder.contracts.events import Arm
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.generation import CycleRecord
from decoder.settings import WorkerSettings
from pipelines.bench.serve.counters import Counters
from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.passes import Level
from pipelines.bench.serve.plan import Plan
from pipelines.bench.serve.setups import Setup
from pipelines.bench.trouble.run import FIXED, FailingCache, measure
from pipelines.bench.trouble.saturation import in_force, steady
from pipelines.bench.trouble.saturation import measure as saturate
from pipelines.bench.trouble.stretches import PHASES, Speed, Stretch, Trouble
from tests.decoder.simulated import trusting_policy
from tests.engines.tiny import tiny_head, tiny_target


@pytest.fixture(scope="module")
def engine() -> ReferenceEngine:
    torch.manual_seed(0)
    target = tiny_target(0)
    return ReferenceEngine(target, tiny_head(0), max_model_len=128)


@pytest.mark.parametrize("trouble", ["drafter", "cache"])
def test_an_arm_breaks_and_is_mended(engine: ReferenceEngine, trouble: Trouble) -> None:
    assert engine.head is not None
    whole, seen = engine.head.lm_head, []

    def tick(what: str) -> None:
        assert engine.head is not None
        seen.append((what.partition(":")[0], engine.head.lm_head is whole))

    asked = itertools.cycle([[1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6]])
    found = list(measure(engine, trusting_policy(), trouble, asked, 2, 12, tick, settles=6))
    assert [s.phase for s in found] == list(PHASES)
    for stretch in found:
        assert stretch.settled_after >= 6
        assert set(stretch.speeds) == {*FIXED, "hybrid"}
        assert {s.prompts for s in stretch.speeds.values()} == {2}
        assert len({s.decoded for s in stretch.speeds.values()}) == 1, "greedy outputs are equal"
        assert stretch.as_dict()["best_fixed"] in FIXED
        assert stretch.share_typical is not None
    broken = {whole for what, whole in seen if what == f"{trouble} broken"}
    assert broken == {trouble != "drafter"}
    assert all(whole for what, whole in seen if what != f"{trouble} broken")
    assert engine.head.lm_head is whole


def test_a_stalled_cycle_moves_the_clock_and_not_the_typical_share() -> None:
    def cycle(arm: Arm, verified: int, us: float) -> CycleRecord:
        return CycleRecord(arm, 1, 0, verified, 0, 0.0, 0.0, us)

    def stretch(stalled: float) -> Stretch:
        plain = [cycle("none", 0, 10.0)] * 5
        cached = [*[cycle("cache", 2, 20.0)] * 2, cycle("cache", 3, stalled)]
        speeds = {"greedy": Speed(5, 50e-6, 1, plain), "suffix": Speed(6, 60e-6, 1, [])}
        speeds["suffix"].cycles.extend(plain + plain[:1])
        speeds["hybrid"] = Speed(9, (40.0 + stalled) * 1e-6, 1, cached)
        return Stretch("drafter", "healthy", speeds, 0, "policy", 0)

    assert stretch(20.0).share == stretch(20.0).share_typical == pytest.approx(1.5)
    assert stretch(220.0).share == pytest.approx(9 / 260 / 0.1)
    assert stretch(220.0).share_typical == pytest.approx(1.5)
    assert stretch(220.0).as_dict()["hybrid_arms"] == {"cache": 3}


def test_a_failing_cache_proposes_what_never_comes() -> None:
    cache = FailingCache(WorkerSettings.load())
    text = np.array([7, 8, 9, 10, 7, 8], np.int32)
    cache.start("r", text, "")
    cache.index()
    right = cache.propose("r", text, 8)
    cache.failing = True
    wrong = cache.propose("r", text, 8)
    assert right is not None and wrong is not None
    assert right.tokens[:2] == [9, 10] and right.probs == wrong.probs
    assert all(a != b for a, b in zip(right.tokens, wrong.tokens, strict=True))


def test_a_batch_fills_and_empties_at_servers_that_take_turns() -> None:
    def launch(plan: Plan, setup: Setup, port: int) -> tuple[list[str], dict[str, str]]:
        assert plan.options.model, "the embedded model"
        started.append(setup.name)
        module = "tests.pipelines.bench.serve.fake_vllm"
        return [sys.executable, "-m", module, str(port)], dict(os.environ)

    started: list[str] = []
    said: list[str] = []
    found = list(saturate(4, 6, 3, said.append, launch, settles=20))
    assert started == ["none", "eagle3-k2", "suffix-k24", "hybrid"]
    assert [s.phase for s in found] == list(PHASES)
    for stretch, at_once in zip(found, (1, 3, 1), strict=True):
        assert set(stretch.speeds) == {"none", "eagle3", "suffix", "hybrid"}
        assert {s.prompts for s in stretch.speeds.values()} == {4 * at_once}
        assert all(0 < s.decoded <= 24 * at_once for s in stretch.speeds.values())
        assert stretch.settled_after >= 20
        assert stretch.best != "hybrid" and stretch.share > 0 and stretch.share_typical is None
    assert "batch broken: hybrid settles" in said


def test_a_page_tells_the_arm_in_force() -> None:
    page = (
        "# TYPE hvd_fallback gauge\n"
        'hvd_fallback{arm="cache",worker="w"} 0.0\nhvd_fallback{arm="none",worker="w"} 1.0\n'
        "# TYPE hvd_fallbacks_total counter\n"
        'hvd_fallbacks_total{worker="w"} 3.0\n'
    )
    assert in_force(page) == ("none", 3)
    assert in_force(page.replace("1.0", "0.0")) == ("policy", 3)
    assert in_force("") == ("policy", 0)


def test_a_crowds_rate_is_that_of_the_time_when_all_places_were_taken() -> None:
    # Two at a time: a and b begin together, c follows a, d follows b; e follows c and is alone at
    # the end.
    ends = {"a": 2.0, "b": 3.0, "c": 4.0, "d": 5.0, "e": 8.0}
    arrivals = {
        "a": (1.5, 2.0), "b": (2.5, 3.0), "c": (3.5, 4.0), "d": (4.5, 5.0), "e": (5.5, 8.0),
    }  # fmt: skip
    replies = [Reply(n, 0.0, 0.0, (1, 2), "", arrivals[n], ends[n]) for n in ends]
    of = Level(2, 8.0, tuple(replies), Counters())
    assert of.tokens == 10
    assert steady(of) == (6, 3.0), "from the end of a to the end of d"
    few = Level(2, 3.0, tuple(replies[:3]), Counters())
    assert steady(few) == (6, 3.0), "three requests, two at a time: counted whole"
    alone = Level(1, 8.5, tuple(replies), Counters())
    assert steady(alone) == (10, 8.0)
