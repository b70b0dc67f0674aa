"""How often trials of a known effect end as they should, where blocks are as noisy as measured and
the effect is another in each session; chance is drawn from a seed.

``python -m tests.learner.evaluation.test_power`` prints the tables of decision 28: of the gate and
its budget of regret where gains are many and small and losses rare and large, with the
floor's probation beside it, and of trials, whose labels may flatter.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.trials import Block, Round
from learner.evaluation.contest import MIN_GAIN, Regret
from learner.evaluation.effect import FEWEST, FORETOLD, WIDTH, gain_effect
from learner.release.comparison import SHARE, Comparison, Table
from learner.settings import LearnerSettings
from tests.decoder.test_probation import probation

NOISE = 0.45
"""Standard deviation of a block's rate, relative: 37 to 54% were measured."""
EACH = 12
"""Rounds of a session."""
SESSIONS = 65
"""In half an hour, one request at a time, of which 259 rounds were measured in ten minutes."""
PAUSE = 0.1
EXPLAINED = 0.55
"""Share of a block's noise that its foretold tokens explain: without effects of sessions, which
nothing explains, the interval is then 0.7 as wide; on recordings it was 0.66 to 0.73."""
LABELS = 0.1
"""Standard deviation of a session's relative gain by labels; 0.05 to 0.2 were recorded."""
BLOCK = {"publication": 1, "steps": 9, "requests": 1}
VERSIONS = {
    side: {"side": side, "version": version}
    for side, version in ((CHAMPION, 1), (TRIAL, 2), (FIRST, 3))
}


def trial(
    ratio: float,
    sd: float,
    seed: int,
    kind: str = "trial",
    anchor: float = 0.0,
    sessions: int = SESSIONS,
    at_once: int = 1,
    to_end: bool = False,
    explained: float = EXPLAINED,
    flatter: float = 0.0,
) -> tuple[str, int, bool, float, bool]:
    """How a comparison ends, after how many sessions, whether its interval was ever wrong, and how
    wide it is at the end, as a part of what it would be if no block told what was foretold; and
    whether it was given half of the steps.

    Args:
        ratio: of the rates over all text, and ``sd`` that of its logarithm between sessions.
        anchor: the first policy's rate over the champion's, where it plays.
        at_once: sessions whose blocks are one.
        to_end: whether it goes on when it has ended, for what its interval says later.
        explained: share of the noise that the text foretells; 0 where no block tells.
        flatter: by which labels make the one compared look faster than it is.
    """
    one = Comparison(kind, 2, 1, number=1, since=1)  # type: ignore[arg-type]
    settings = LearnerSettings(trial_minutes=sessions / 60.0)
    rng, wrong, word = np.random.default_rng([seed, int(1e4 * ratio), int(1e2 * sd)]), False, ""
    noise, effects = NOISE / np.sqrt(at_once), sd / np.sqrt(at_once)
    gains = rng.normal(ratio - 1.0 + flatter, LABELS / np.sqrt(at_once), sessions)
    rates = {TRIAL: ratio, CHAMPION: 1.0} | ({FIRST: anchor} if anchor else {})
    for session in range(sessions):
        # of mean 1, so that the ratio of all tokens over all time is what is said
        special = np.exp(effects * rng.normal() - effects**2 / 2.0)
        text, rest = rng.normal(size=(2, EACH, len(rates)))
        luck = np.sqrt(explained) * text + np.sqrt(1.0 - explained) * rest
        cost = np.exp(noise * luck) / [*rates.values()]
        told = np.clip(0.4 - 0.12 * text / np.sqrt(at_once), 0.0, 1.0) * bool(explained)
        cost[:, 0] *= special
        wall = cost * (1.0 + PAUSE * rng.exponential(size=cost.shape))
        # the rounds of a session are one pair: they are summed up here, which is faster
        sums = (each.sum(axis=0).tolist() for each in (wall, cost, 16.0 * told))
        sides = zip(rates, *sums, strict=True)
        blocks = tuple(
            Block.model_construct(
                **BLOCK, **VERSIONS[side], tokens=16.0 * EACH, us=us, cost_us=cost_us, foretold=fore
            )
            for side, us, cost_us, fore in sides
        )
        named = {"number": session, "unit": session, "time": float(session), "blocks": blocks}
        one.take(Round.model_construct(scope="s", worker="w", life="ab", **named), float(session))
        one.seconds = float(session + 1)
        if session % 4 != 3 and session + 1 < sessions:
            continue  # a look takes longer than a session
        one.labels = gain_effect(gains[: session + 1], np.ones(session + 1))
        found = one.figures().cost
        wrong |= not found.low <= ratio <= found.high
        outcome = one.outcome(settings)
        one.share = one.wider(settings)
        if outcome is not None and not word:
            word = outcome.word
            if not to_end:
                break
    return word, session + 1, wrong, _narrower(one), one.share > SHARE


def _narrower(one: Comparison) -> float:
    blind = Table(one.pairs.numbers[:])
    for side in (FORETOLD, WIDTH // 2 + FORETOLD):
        blind.numbers[side::WIDTH] = array("d", [0.0]) * len(blind)
    with_it, without = (table.effects()[0] for table in (one.pairs, blind))
    return float(np.log(with_it.high / with_it.low) / np.log(without.high / without.low))


def most(runs: int, chance: float) -> float:
    """Share of ``runs`` that errors of such a ``chance`` stay within, but once in a thousand."""
    return float(binom.ppf(0.999, runs, chance)) / runs


RUNS = 120


@pytest.mark.parametrize("sd", [0.0, 0.2, 0.4])
def test_an_interval_is_wrong_as_rarely_as_it_says_whatever_sessions_do(sd: float) -> None:
    ends = [trial(1.0, sd, seed, to_end=True) for seed in range(RUNS)]
    assert np.mean([wrong for _, _, wrong, *_ in ends]) <= most(RUNS, 0.05)


@pytest.mark.parametrize("sd", [0.0, 0.2, 0.4])
def test_who_is_slower_is_not_promoted(sd: float) -> None:
    ends = [trial(0.97, sd, seed) for seed in range(RUNS)]
    assert np.mean([word == "promote" for word, *_ in ends]) <= most(RUNS, 0.02)


def test_a_busy_trial_promotes_no_policy_that_is_one_per_cent_slower() -> None:
    busy = {"at_once": 40, "sessions": 180}
    for flatter in (0.0, 0.01):
        ends = [trial(0.99, 0.2, seed, flatter=flatter, **busy)[0] for seed in range(60)]  # type: ignore[arg-type]
        assert np.mean([word == "promote" for word in ends]) <= most(60, 0.05)


@pytest.mark.parametrize("sd", [0.2, 0.4])
def test_a_policy_that_is_much_slower_is_not_given_half_of_the_steps(sd: float) -> None:
    wide = [trial(0.8, sd, seed, to_end=True, flatter=0.3)[4] for seed in range(RUNS)]
    assert np.mean(wide) <= most(RUNS, 0.05)


def test_live_rounds_keep_out_what_labels_flatter_by_more_than_the_margin() -> None:
    ends = [trial(0.85, 0.2, seed, flatter=0.18)[0] for seed in range(RUNS)]
    assert np.mean([word == "promote" for word in ends]) <= most(RUNS, 0.05)


def test_where_much_is_decoded_who_is_faster_is_promoted() -> None:
    busy = {"at_once": 40, "sessions": 180}
    for ratio, word in ((0.9, "drop"), (1.03, "promote"), (1.05, "promote")):
        ends = [trial(ratio, 0.2, seed, **busy)[0] == word for seed in range(40)]  # type: ignore[arg-type]
        assert np.mean(ends) >= 0.9


def test_losses_do_not_add_up_beside_the_first_policy() -> None:
    busy = {"at_once": 40, "sessions": 180}
    # faster than the champion, who has lost more than the margin
    ends = [trial(1.02, 0.2, seed, anchor=1.18, **busy)[0] for seed in range(40)]  # type: ignore[arg-type]
    assert np.mean([word == "promote" for word in ends]) <= most(40, 0.05)


def test_what_cannot_be_told_keeps_the_champion_and_says_how_long_it_would_take() -> None:
    words = [trial(1.0, 0.4, seed)[0] for seed in range(20)]
    assert words.count("cannot tell") >= 16 and "drop" not in words


def test_a_champion_that_is_no_slower_is_hardly_ever_rolled_back() -> None:
    ends = [trial(1.0, 0.2, seed, "watch")[0] for seed in range(RUNS)]
    assert np.mean([word == "roll back" for word in ends]) <= most(RUNS, 0.05)
    ends = [trial(1.3, 0.0, seed, "watch")[0] for seed in range(20)]
    assert ends.count("roll back") >= 16


SKEWS = [(0.1, 9.0), (0.03, 32.4), (0.01, 99.0)]
"""Chance of a loss and how large, where all else gains 1: the mean is 0."""
LENGTH = 128
STEPS = 40.0
"""Plain steps of a cluster."""


def gate(gains: np.ndarray, each: int) -> tuple[int, float, float]:
    """After how many sessions of ``each`` clusters a challenger passes, 0 if never; and what it
    gains over the first policy from then on, until it is taken back by the budget of regret, and
    what under the floor's probation."""
    votes = gains.reshape(-1, each).sum(axis=1)
    times = np.full(len(votes), STEPS * each)
    for n in range(FEWEST, len(votes) + 1):
        if gain_effect(votes[:n], times[:n]).low > 1.0 + MIN_GAIN:
            break
    else:
        return 0, 0.0, 0.0
    served = np.tile(gains, 4)[n * each :]
    regret, gained = Regret(), 0.0
    for gain in served.tolist():
        regret.scale(gain)
        regret.update(gain, STEPS)
        gained += gain
        if regret.behind > regret.budget:
            break
    return n, gained, probation(served)[1]


def test_a_budget_of_regret_bounds_what_rare_and_large_losses_cost() -> None:
    draw = np.random.default_rng(1)
    for chance, loss in SKEWS[:2]:
        lost = draw.random((200, LENGTH)) < chance
        ends = [gate(row, 1) for row in np.where(lost, -loss, draw.uniform(0.0, 0.9, lost.shape))]
        assert np.mean([gained for n, gained, _ in ends if n]) > -2.0 * loss


def _trials(runs: int) -> None:
    for pace, busy in (
        ("one at a time, half an hour", {}),
        ("40 at a time, half an hour", {"at_once": 40, "sessions": 180}),
    ):
        for flatter in (0.0, 0.03):
            print(f"\n{pace}, labels flatter by {flatter:.0%}\n")
            print("| sd | ratio | promoted | dropped | cannot tell | sessions | wrong | width |")
            for sd in (0.0, 0.2, 0.4):
                for ratio in (0.90, 0.95, 0.97, 0.99, 1.00, 1.03, 1.05, 1.08):
                    setting: dict[str, Any] = {**busy, "flatter": flatter}
                    ends = [trial(ratio, sd, seed, **setting) for seed in range(runs)]
                    words, took, wrong, widths, _ = zip(*ends, strict=True)
                    shares = [words.count(w) / runs for w in ("promote", "drop", "cannot tell")]
                    told = " | ".join(f"{share:.1%}" for share in shares)
                    done = [n for n, word in zip(took, words, strict=True) if word == "promote"]
                    print(
                        f"| {sd} | {ratio:.2f} | {told} | {np.median(done or [0]):.0f} | "
                        f"{np.mean(wrong):.1%} | {np.median(widths):.2f} |", flush=True,
                    )  # fmt: skip


def _gates(runs: int) -> None:
    """Of which all clusters but a few gain about 1 and the few lose all."""
    print(
        "\n| loss: chance, size | clusters a session | mean | passed | sessions | gained |", end=""
    )
    print(" on probation |")
    for chance, loss in [(0.0, 0.0), *SKEWS]:
        for each in (1, 8):
            for mean in (0.0, -0.2, 0.5):
                draw = np.random.default_rng(5)
                lost = draw.random((runs, LENGTH * each)) < chance
                noise = draw.normal(0.0, 1.0, lost.shape) if not chance else 0.0
                gains = draw.uniform(0.5, 1.5, lost.shape) + mean / (1.0 - chance) - (not chance)
                ends = [gate(row, each) for row in np.where(lost, -loss, gains + noise)]
                passed = [n for n, *_ in ends if n]
                print(
                    f"| {chance:.0%}, {loss:.1f} | {each} | {mean} | {len(passed) / runs:.1%} | "
                    f"{np.median(passed or [0]):.0f} | "
                    f"{np.mean([g for n, g, _ in ends if n] or [0.0]):.2f} | "
                    f"{np.mean([p for n, _, p in ends if n] or [0.0]):.2f} |", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    _gates(many)
    _trials(many)
