"""The bench of comparisons by turns: what is true is found, and what is not there is not."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX
from decoder.trial.sides import STOCK
from pipelines.bench.trial import Steps, _Always, decode, measure, play, table
from pipelines.replay.traces import Trace


def recordings(count: int = 12) -> list[Trace]:
    """Some copying, some news, and a drafter that is right about two tokens."""
    rng = np.random.default_rng(0)
    phrase = rng.integers(1, 200, 30).tolist()
    made = []
    for number in range(count):
        news = rng.integers(1, 200, 60).tolist()
        output = [*news, *phrase, *rng.integers(1, 200, 20).tolist(), *phrase]
        accepted = rng.integers(0, 4, len(output)).tolist()
        made.append(Trace(f"s{number}", phrase, output, "made-up", model_accepted=accepted))
    return made


def test_a_side_alone_decides_every_step() -> None:
    traces = recordings(3)
    plain = decode(traces, frequency_policy("s"), _Always(STOCK[PLAIN]))
    assert set(plain.tokens.tolist()) == {1} and len(set(plain.us.tolist())) == 1
    assert plain.tokens.sum() == sum(len(t.output) - 1 for t in traces)
    model = decode(traces, frequency_policy("s"), _Always(STOCK[MODEL]))
    assert model.tokens.sum() == plain.tokens.sum() and model.tokens.max() <= 5


def test_an_effect_is_seen_sooner_the_larger_it_is() -> None:
    rng = np.random.default_rng(1)
    steps = Steps(rng.integers(1, 5, 4_000), np.full(4_000, 1_000.0))
    rounds = play(steps, np.exp(rng.normal(0, 0.1, 1_009)), seed=0, rounds=1_500)
    assert 12 <= rounds.seen(0.5, 0.05) < rounds.seen(0.1, 0.05)
    assert np.all(np.diff(rounds.steps) > 0)
    assert rounds.mine[:, 0] == pytest.approx(rounds.other[:, 0])


def test_all_figures_are_there() -> None:
    found = measure(recordings(), frequency_policy("s"), None, lambda _: None, runs=4, rounds=40)
    assert found.runs == 4 and found.excluded <= 1
    assert [seen.percent for seen in found.power] == pytest.approx([20, 5, 2])
    assert set(found.sides) == {PLAIN, SUFFIX, MODEL}
    for side in found.sides.values():
        assert side["alone"] > 0 and side["low"] <= side["by_turns"] <= side["high"]
    assert table(found).row_count == 1 + 3 + 3
