"""A router that does not pay stops looking, at next to no loss, and looks again soon enough."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest

from decoder.core.costs import LiveCosts
from decoder.core.guards.controller import FIRST_WAIT, LOSS, PROBE, SPENT, Controller
from decoder.core.payoff.model_arm import ModelArm
from decoder.core.step_timer import StepTimer
from decoder.core.tracker import Progress
from tests.decoder.simulated import Router

PLAIN = 5_000.0
STEPS = 10_000
ONE = Progress(closed=1, committed=1, verified=0, predicted=0, drafts=0, tokens=1)


@dataclass(frozen=True)
class Told:
    """Time over that of never proposing, and whether the router was awake, step by step."""

    time: float
    awake: np.ndarray


def without_drafter() -> Controller:
    return Controller(ModelArm(2.0, 0))


def serve(own: float, gains: Iterable[float], doze: bool = True) -> Told:
    """Steps whose drafts are worth ``gains`` plain steps, at ``own`` plain steps for proposing."""
    judge, times, awake = without_drafter(), [], []
    for gain in gains:
        looks = judge.proposes or not doze
        awake.append(looks)
        times.append(1.0 + (own - gain) * looks)
        judge.observe(own * looks, gain * looks, 8, PLAIN)
    return Told(float(np.mean(times)), np.array(awake))


@pytest.mark.parametrize("own", [0.002, 0.01, 0.05, 0.2, 0.5])
def test_with_nothing_to_copy_a_router_costs_less_than_a_hundredth(own: float) -> None:
    told = serve(own, np.zeros(STEPS))
    assert told.time < 1.01
    assert told.time <= serve(own, np.zeros(STEPS), doze=False).time


@pytest.mark.parametrize("own", [0.01, 0.05, 0.2])
def test_where_copying_comes_back_it_wakes_within_one_wait(own: float) -> None:
    """The waits grow to where probing takes ``SPENT``: PROBE * own / SPENT steps."""
    half = STEPS // 2
    told = serve(own, (np.arange(STEPS) >= half) * 0.5)
    wait = max(PROBE * own / SPENT, FIRST_WAIT)
    assert told.awake[half - 1_000 : half].mean() < 0.25
    assert told.awake[half + round(wait) + PROBE :].all()


@pytest.mark.parametrize("own", [0.01, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("every", [100, 1_000, 4_000])
def test_it_is_never_much_worse_than_the_better_of_sleeping_and_waking(
    own: float, every: int
) -> None:
    """Copied stretches of a tenth of the time, each step of which is worth half a plain one."""
    gains = (np.arange(STEPS) % every < every / 10) * 0.5
    told = serve(own, gains)
    assert told.time < min(1.0, serve(own, gains, doze=False).time) + 0.02


def test_another_batch_or_another_cost_of_a_step_ends_the_sleep() -> None:
    def asleep() -> Controller:
        doze = without_drafter()
        for _ in range(round(LOSS / 0.2) + 1):
            doze.observe(0.2, 0.0, 64, PLAIN)
        assert not doze.proposes
        return doze

    for requests, plain in ((16, PLAIN), (200, PLAIN), (64, 3 * PLAIN), (64, 0.4 * PLAIN)):
        doze = asleep()
        doze.observe(0.0, 0.0, 60, 1.1 * PLAIN)
        assert not doze.proposes
        doze.observe(0.0, 0.0, requests, plain)
        assert doze.proposes


def test_a_router_that_takes_longer_than_the_steps_it_saves_sleeps() -> None:
    assert serve(5.0, np.full(500, 1.2)).awake.mean() < 0.2


def test_a_machine_that_stands_still_for_a_second_is_not_the_routers_doing() -> None:
    doze = without_drafter()
    for step in range(400):
        stalled = step % 100 == 50
        doze.observe(200.0 if stalled else 0.02, 0.1, 8, PLAIN)
        assert doze.proposes


def test_a_process_that_stands_still_puts_no_router_to_sleep() -> None:
    """Nothing is copied for a while: two stalls of the router's own would have been enough."""
    router = Router(guarded=True)
    router.costs = LiveCosts()
    for step in range(300):
        own = PLAIN * (50.0 if step % 30 == 29 else 0.002)
        router.costs.proposed(1, own)
        router.costs.observe(1, 1, 0, PLAIN)
        router._learn(router.report(["r"], step_tokens=1), StepTimer(exposed_us=own), ONE, 0.0)
        assert router.controller.proposes, step
