"""Who decides when: shares are kept, orders are drawn, and nothing is booked that was not made."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL, Policy, frequency_policy
from decoder.contracts.trials import MAX_GROUPS, MODEL, PLAIN, SUFFIX, Round, decode_round
from decoder.trial.block import LEAD, LENGTH, Account, Made
from decoder.trial.effect import FEWEST, UNKNOWN, Effect, effect, effect_of
from decoder.trial.sides import OUTSIDE, STOCK, Side
from decoder.trial.turns import ROUNDS, WAITING, Turns

CHAMPION_POLICY = replace(frequency_policy("s"), version=3, publication=8)
FIRST_POLICY = replace(frequency_policy("s"), role=FIRST)
TOKENS = {"": 3, CHAMPION: 3, PLAIN: 1, SUFFIX: 2, MODEL: 2, FIRST: 2, TRIAL: 4}
"""That each side commits in a step."""


def made(tokens: int, us: float = 1_000.0, late_us: float = 0.0, rows: int = 1) -> Made:
    names = tuple(f"r{i}" for i in range(rows))
    return Made(tokens * rows, names, us, us, late_us, {("t", "w"): [tokens * rows, rows]})


def turns_of(
    *names: str, holdout: float = 0.3, held: dict[str, Policy] | None = None, seed: int = 0
) -> Turns:
    return Turns(names, holdout, {} if held is None else held, FIRST_POLICY, seed)


def step(turns: Turns, come_to: Made | None = None, counts: bool = True) -> str:
    """Decode a step; who decided it."""
    side = turns.next(CHAMPION_POLICY)
    name = side.name if side is not None else ""
    turns.book(side, come_to or made(TOKENS[name]), counts)
    return name


def play(turns: Turns, steps: int, counts: bool = True) -> list[str]:
    return [step(turns, counts=counts) for _ in range(steps)]


def trial_of(share: float, version: int = 9) -> Policy:
    policy = replace(frequency_policy("s"), role=TRIAL, version=version, publication=version)
    return replace(policy, share=share)


@pytest.mark.parametrize(
    "held", [{}, {FIRST: FIRST_POLICY}, {TRIAL: trial_of(0.0)}, {TRIAL: trial_of(1e-310)}]
)
def test_without_a_share_nobody_plays(held: dict[str, Policy]) -> None:
    turns = turns_of(PLAIN, SUFFIX, holdout=0.0, held=held)
    assert set(play(turns, 2_000)) == {""} and not turns.rounds


@pytest.mark.parametrize(
    ("holdout", "every"), [(0.02, 1), (0.2, 1), (0.5, 1), (0.04, 10), (0.04, 50), (0.04, 0)]
)
def test_sides_share_the_steps_that_they_were_given(holdout: float, every: int) -> None:
    """Also where all but one of ``every`` steps read prompts, or all: they decide in no more."""
    turns, steps, played = turns_of(PLAIN, SUFFIX, holdout=holdout), 60_000, Counter[str]()
    for number in range(steps):
        played[step(turns, counts=every > 0 and number % every == 0)] += 1
    assert (played[PLAIN] + played[SUFFIX]) / steps == pytest.approx(holdout, rel=0.3)
    assert {len(one.accounts) for one in turns.rounds} <= {3}, "each is in all rounds, be it slow"


def test_every_round_has_one_champion_and_an_order_drawn_by_lot() -> None:
    turns = turns_of(PLAIN, SUFFIX, holdout=0.5)
    play(turns, 8_000)
    orders = Counter(tuple(a.side.name for a in r.accounts) for r in turns.rounds)
    assert all(order.count(CHAMPION) == 1 for order in orders)
    whole = {o: n for o, n in orders.items() if len(o) == 3}
    assert len(whole) == 6 and max(whole.values()) < 3 * min(whole.values())


def test_blocks_are_stretches_of_text_and_as_long_for_all() -> None:
    turns = turns_of(PLAIN, SUFFIX, MODEL, FIRST, holdout=0.8)
    play(turns, 8_000)
    blocks = [a for r in turns.rounds for a in r.accounts]
    assert len({a.side.name for a in blocks}) == 5
    assert all(a.tokens == pytest.approx(LENGTH) for a in blocks)
    assert all(a.us == pytest.approx(1_000 * LENGTH / TOKENS[a.side.name]) for a in blocks)


def test_a_jump_beyond_the_end_counts_for_its_part() -> None:
    account = Account(Side(CHAMPION, CHAMPION_POLICY))
    assert account.add(made(64, us=640.0)) == pytest.approx(LENGTH / 64)
    assert account.full and account.tokens == pytest.approx(LENGTH)
    assert account.us == pytest.approx(10 * LENGTH)
    late = Account(Side(CHAMPION, CHAMPION_POLICY))
    assert late.add(made(int(LEAD))) == 0.0 and not late.taken, "the beginning is left out"


def test_all_that_was_committed_is_booked_once() -> None:
    held = {TRIAL: trial_of(0.2)}
    turns = turns_of(PLAIN, SUFFIX, holdout=0.4, held=held)
    tokens = us = 0.0
    rounds = []
    for at in range(9_000):
        if at % 700 == 350:  # mid-round or not
            held[TRIAL] = trial_of(0.2, version=at)
        if at == 5_000:
            del held[TRIAL]
        side = turns.next(CHAMPION_POLICY)
        came_to = made(TOKENS[side.name if side else ""], us=100.0 + at % 7)
        turns.book(side, came_to, counts=at % 11 > 0)
        tokens, us = tokens + came_to.tokens, us + came_to.us
        while turns.rounds:
            rounds.append(turns.rounds.popleft())
    turns.next(replace(CHAMPION_POLICY, version=4))  # gives up what is open
    sums = turns.sums
    assert sum(s.tokens for s in sums.values()) == pytest.approx(tokens)
    assert sum(s.us for s in sums.values()) == pytest.approx(us)
    for name in (PLAIN, SUFFIX, CHAMPION, TRIAL):
        told = [a for r in rounds for a in r.accounts if a.side.name == name]
        assert sums[name].tokens == pytest.approx(sum(a.tokens for a in told))
        assert sums[name].steps == sum(a.taken for a in told) > 0


def test_a_step_that_also_reads_prompts_is_passed_over() -> None:
    """Its text is left behind, and of it nothing is in the block."""
    turns = turns_of(PLAIN, holdout=0.9)
    taken = 0
    for _ in range(200):
        side = turns.next(CHAMPION_POLICY)
        plain = side is not None and side.name == PLAIN
        taken += plain
        counts = plain and taken % 2 > 0
        turns.book(side, made(1, us=100.0 if counts else 9_000.0), counts)
    plain, champion = sorted(turns.rounds[0].accounts, key=lambda a: a.side.name != PLAIN)
    assert plain.at == champion.at == LEAD + LENGTH and plain.steps == LEAD + LENGTH
    assert (plain.taken, plain.tokens, plain.us) == (LENGTH / 2, LENGTH / 2, 100.0 * LENGTH / 2)


def test_a_block_of_which_nothing_was_taken_in_is_no_pair() -> None:
    turns = turns_of(PLAIN, holdout=0.9)
    play(turns, 400, counts=False)
    for number, played in enumerate(turns.rounds):
        blocks = tuple(account.block() for account in played.accounts)
        one = Round(scope="s", worker="w", life="a", number=number, time=played.time, blocks=blocks)
        assert decode_round(one.model_dump_json().encode()) == one
        assert {(b.steps, b.requests, b.tokens, b.us, b.groups) for b in blocks} == {
            (0, 0, 0.0, 0.0, ())
        }
        assert effect_of([one], CHAMPION, PLAIN) == UNKNOWN
    assert turns.made > 5


def test_a_new_champion_or_trial_ends_the_round_under_way() -> None:
    held = {TRIAL: trial_of(0.5)}
    turns = turns_of(held=held, holdout=0.0)
    assert play(turns, 200)[-1] and turns.made
    held.clear()
    assert turns.next(CHAMPION_POLICY) is None and not turns.playing
    assert turns.next(CHAMPION_POLICY) is None and not turns.dealing
    versions = {(a.side.name, a.side.policy.version) for r in turns.rounds for a in r.accounts}
    assert versions == {(TRIAL, 9), (CHAMPION, 3)}


def test_a_side_that_failed_plays_again_with_another_policy_only() -> None:
    held = {TRIAL: trial_of(0.5)}
    turns = turns_of(PLAIN, holdout=0.2, held=held)
    while (side := turns.next(CHAMPION_POLICY)) is None or side.name != TRIAL:
        turns.book(side, made(1), counts=True)
    turns.fail(side)
    played = Counter(play(turns, 4_000))
    assert not played[TRIAL] and played[PLAIN] and turns.failed == {TRIAL: 1}
    held[TRIAL] = trial_of(0.5, version=10)
    assert Counter(play(turns, 4_000))[TRIAL]


def test_who_drafts_pays_for_reading_his_own_text_late_and_no_others() -> None:
    """Whoever came before, and in whose steps it was read: a champion that drafts nothing for a
    while would else pay for the text of all."""
    turns = turns_of(PLAIN, SUFFIX, MODEL, holdout=0.9)
    for _ in range(8_000):
        side = turns.next(CHAMPION_POLICY)
        turns.book(side, made(2, us=1_500.0, late_us=500.0), counts=True)
    orders = {tuple(a.side.name for a in played.accounts) for played in turns.rounds}
    assert len(orders) > 10
    read = 500.0 * LENGTH / 2
    for account in (a for played in turns.rounds for a in played.accounts):
        assert account.late_us == pytest.approx(read if account.side.drafts else 0.0)
        assert account.us - account.late_us == pytest.approx(1_000 * LENGTH / 2)
        assert account.cost_us - account.late_us == pytest.approx(1_500 * LENGTH / 2)
    turns.fail(STOCK[PLAIN])  # what is under way is booked
    assert sum(s.us for s in turns.sums.values()) == pytest.approx(8_000 * 1_500.0)


def test_groups_beyond_the_most_are_one() -> None:
    account = Account(STOCK[PLAIN])
    for n in range(3 * MAX_GROUPS):
        account.groups.clear() if n < LEAD else None
        account.at = min(account.at, LEAD)
        account.add(Made(1, ("r",), 1.0, 1.0, 0.0, {(f"t{n}", ""): [1, 1]}))
    block = account.block()
    assert len(block.groups) == MAX_GROUPS
    assert sum(g.tokens for g in block.groups) == pytest.approx(block.tokens)
    assert sum(g.cost_us for g in block.groups) == pytest.approx(block.cost_us)


def test_rounds_that_nobody_fetches_are_dropped_and_counted() -> None:
    turns = turns_of(PLAIN, holdout=0.9)
    play(turns, 30 * (WAITING + 60))
    assert len(turns.rounds) == WAITING and turns.dropped == turns.made - WAITING > 0
    blocks = sum(s.tokens for n, s in turns.sums.items() if n != OUTSIDE)
    assert blocks == pytest.approx(2 * LENGTH * turns.made), "and summed up all the same"


def effects_by_turns(seed: int, rounds: int) -> list[Effect]:
    """After each further round, of a trial over a champion that decides alike, on text that copies
    in stretches, with noise in each step."""
    rng = np.random.default_rng(seed)
    copies = np.repeat(rng.random(400) < 0.4, rng.geometric(0.1, 400))
    tokens = np.where(copies, rng.integers(3, 9, len(copies)), rng.integers(1, 3, len(copies)))
    took = (1_000.0 + 20.0 * tokens) * np.exp(rng.normal(0.0, 0.1, len(copies)))
    turns, at = turns_of(holdout=0.0, held={TRIAL: trial_of(0.5)}, seed=seed), 0
    while len(turns.rounds) < rounds:
        step(turns, made(int(tokens[at]), float(took[at])))
        at = (at + 1) % len(tokens)
    pairs = np.array(
        [
            [(a.tokens, a.us) for a in sorted(r.accounts, key=lambda a: a.side.name != TRIAL)]
            for r in turns.rounds
        ]
    )
    return [effect(pairs[:n, 0], pairs[:n, 1]) for n in range(FEWEST, rounds + 1, 4)]


def test_a_side_against_itself_is_told_apart_no_more_often_than_stated() -> None:
    """Whenever one looks: shares, orders and cut blocks favour nobody."""
    runs = [effects_by_turns(seed, 100) for seed in range(100)]
    excluded = sum(any(f.low > 1.0 or f.high < 1.0 for f in found) for found in runs)
    assert excluded <= 5
    assert np.median([found[-1].ratio for found in runs]) == pytest.approx(1.0, abs=0.02)


def test_rounds_are_of_one_unit_as_long_as_a_session_of_its_first_is_there() -> None:
    turns = turns_of(PLAIN, holdout=0.9)
    for sessions in ("ab", "bc", "cd", "de"):
        until = turns.made + 5
        while turns.made < until:
            step(turns, made(2)._replace(sessions=frozenset(sessions)))
    units = [one.unit for one in turns.rounds]
    first = units[0]
    assert units[:9] == [first] * 9 and units[-9:] == [units[-1]] * 9 != [first] * 9
    assert len(set(units)) == 2, "cd has none of ab, and de has one of cd"
    while turns.made < 220:
        step(turns, made(2)._replace(sessions=frozenset("f")))
    endless = {one.unit for one in turns.rounds} - {*units}
    assert len(endless) == pytest.approx(200 / ROUNDS, abs=1), "a session without an end is many"


def test_the_first_policy_plays_beside_a_trial_unless_it_is_the_champion() -> None:
    other = replace(FIRST_POLICY, threshold=7.0)
    for first, plays in ((FIRST_POLICY, False), (other, True)):
        turns = turns_of(holdout=0.0, held={TRIAL: trial_of(0.2), FIRST: first})
        assert (FIRST in play(turns, 2_000)) is plays
        held_out = turns_of(PLAIN, FIRST, holdout=0.02, held={TRIAL: trial_of(0.2), FIRST: first})
        sides = Counter(play(held_out, 20_000))
        assert sides[FIRST] > sides[TRIAL] / 2, "an anchor that comes rarely decides nothing"
    unanchored = Turns((), 0.0, {TRIAL: trial_of(0.2), FIRST: other}, other, 0, anchored=False)
    assert FIRST not in play(unanchored, 2_000)
