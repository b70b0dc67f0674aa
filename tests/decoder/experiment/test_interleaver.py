"""Who decides when: shares are kept, orders are drawn, and nothing is booked that was not made."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL, Policy, frequency_policy
from decoder.contracts.trials import MAX_GROUPS, MODEL, PLAIN, SUFFIX, Round, decode_round
from decoder.experiment.block import WARMUP_TOKENS, WINDOW_TOKENS, BlockTotals, StepOutcome
from decoder.experiment.interleaver import MAX_CLUSTER_ROUNDS, MAX_PENDING_ROUNDS, Interleaver
from decoder.experiment.variants import OUTSIDE, STOCK, Variant
from learner.evaluation.effect import FEWEST, UNKNOWN, Effect, effect, effect_of

CHAMPION_POLICY = replace(frequency_policy("s"), version=3, publication=8)
FIRST_POLICY = replace(frequency_policy("s"), role=FIRST)
TOKENS = {"": 3, CHAMPION: 3, PLAIN: 1, SUFFIX: 2, MODEL: 2, FIRST: 2, TRIAL: 4}
"""That each variant commits in a step."""


def made(tokens: int, us: float = 1_000.0, prefill_us: float = 0.0, rows: int = 1) -> StepOutcome:
    names = tuple(f"r{i}" for i in range(rows))
    return StepOutcome(
        tokens * rows, names, us, us, prefill_us, {("t", "w"): [tokens * rows, rows]}
    )


def interleaver_of(
    *names: str, holdout: float = 0.3, policies: dict[str, Policy] | None = None, seed: int = 0
) -> Interleaver:
    return Interleaver(names, holdout, {} if policies is None else policies, FIRST_POLICY, seed)


def step(interleaver: Interleaver, outcome: StepOutcome | None = None, counts: bool = True) -> str:
    """Decode a step; who decided it."""
    variant = interleaver.next_variant(CHAMPION_POLICY)
    name = variant.name if variant is not None else ""
    interleaver.record_step(variant, outcome or made(TOKENS[name]), counts)
    return name


def play(interleaver: Interleaver, steps: int, counts: bool = True) -> list[str]:
    return [step(interleaver, counts=counts) for _ in range(steps)]


def trial_of(share: float, version: int = 9) -> Policy:
    policy = replace(frequency_policy("s"), role=TRIAL, version=version, publication=version)
    return replace(policy, share=share)


@pytest.mark.parametrize(
    "policies", [{}, {FIRST: FIRST_POLICY}, {TRIAL: trial_of(0.0)}, {TRIAL: trial_of(1e-310)}]
)
def test_without_a_share_nobody_plays(policies: dict[str, Policy]) -> None:
    interleaver = interleaver_of(PLAIN, SUFFIX, holdout=0.0, policies=policies)
    assert set(play(interleaver, 2_000)) == {""} and not interleaver.rounds


@pytest.mark.parametrize(
    ("holdout", "every"), [(0.02, 1), (0.2, 1), (0.5, 1), (0.04, 10), (0.04, 50), (0.04, 0)]
)
def test_sides_share_the_steps_that_they_were_given(holdout: float, every: int) -> None:
    """Also where all but one of ``every`` steps read prompts, or all: they decide in no more."""
    interleaver, steps, played = (
        interleaver_of(PLAIN, SUFFIX, holdout=holdout),
        60_000,
        Counter[str](),
    )
    for number in range(steps):
        played[step(interleaver, counts=every > 0 and number % every == 0)] += 1
    assert (played[PLAIN] + played[SUFFIX]) / steps == pytest.approx(holdout, rel=0.3)
    assert {len(one.blocks) for one in interleaver.rounds} <= {3}, (
        "each is in all rounds, be it slow"
    )


def test_every_round_has_one_champion_and_an_order_drawn_by_lot() -> None:
    interleaver = interleaver_of(PLAIN, SUFFIX, holdout=0.5)
    play(interleaver, 8_000)
    orders = Counter(tuple(a.variant.name for a in r.blocks) for r in interleaver.rounds)
    assert all(order.count(CHAMPION) == 1 for order in orders)
    whole = {o: n for o, n in orders.items() if len(o) == 3}
    assert len(whole) == 6 and max(whole.values()) < 3 * min(whole.values())


def test_blocks_are_stretches_of_text_and_as_long_for_all() -> None:
    interleaver = interleaver_of(PLAIN, SUFFIX, MODEL, FIRST, holdout=0.8)
    play(interleaver, 8_000)
    blocks = [a for r in interleaver.rounds for a in r.blocks]
    assert len({a.variant.name for a in blocks}) == 5
    assert all(a.tokens == pytest.approx(WINDOW_TOKENS) for a in blocks)
    assert all(
        a.us == pytest.approx(1_000 * WINDOW_TOKENS / TOKENS[a.variant.name]) for a in blocks
    )


def test_a_jump_beyond_the_end_counts_for_its_part() -> None:
    block = BlockTotals(Variant(CHAMPION, CHAMPION_POLICY))
    assert block.add(made(64, us=640.0)) == pytest.approx(WINDOW_TOKENS / 64)
    assert block.complete and block.tokens == pytest.approx(WINDOW_TOKENS)
    assert block.us == pytest.approx(10 * WINDOW_TOKENS)
    late = BlockTotals(Variant(CHAMPION, CHAMPION_POLICY))
    assert late.add(made(int(WARMUP_TOKENS))) == 0.0 and not late.counted_steps, (
        "the beginning is left out"
    )


def test_all_that_was_committed_is_booked_once() -> None:
    policies = {TRIAL: trial_of(0.2)}
    interleaver = interleaver_of(PLAIN, SUFFIX, holdout=0.4, policies=policies)
    tokens = us = 0.0
    rounds = []
    for at in range(9_000):
        if at % 700 == 350:  # mid-round or not
            policies[TRIAL] = trial_of(0.2, version=at)
        if at == 5_000:
            del policies[TRIAL]
        variant = interleaver.next_variant(CHAMPION_POLICY)
        outcome = made(TOKENS[variant.name if variant else ""], us=100.0 + at % 7)
        interleaver.record_step(variant, outcome, counts=at % 11 > 0)
        tokens, us = tokens + outcome.tokens, us + outcome.us
        while interleaver.rounds:
            rounds.append(interleaver.rounds.popleft())
    interleaver.next_variant(replace(CHAMPION_POLICY, version=4))  # gives up what is open
    sums = interleaver.totals
    assert sum(s.tokens for s in sums.values()) == pytest.approx(tokens)
    assert sum(s.us for s in sums.values()) == pytest.approx(us)
    for name in (PLAIN, SUFFIX, CHAMPION, TRIAL):
        told = [a for r in rounds for a in r.blocks if a.variant.name == name]
        assert sums[name].tokens == pytest.approx(sum(a.tokens for a in told))
        assert sums[name].steps == sum(a.counted_steps for a in told) > 0


def test_a_step_that_also_reads_prompts_is_passed_over() -> None:
    """Its text is left behind, and of it nothing is in the block."""
    interleaver = interleaver_of(PLAIN, holdout=0.9)
    taken = 0
    for _ in range(200):
        variant = interleaver.next_variant(CHAMPION_POLICY)
        plain = variant is not None and variant.name == PLAIN
        taken += plain
        counts = plain and taken % 2 > 0
        interleaver.record_step(variant, made(1, us=100.0 if counts else 9_000.0), counts)
    plain, champion = sorted(interleaver.rounds[0].blocks, key=lambda a: a.variant.name != PLAIN)
    assert (
        plain.position == champion.position == WARMUP_TOKENS + WINDOW_TOKENS
        and plain.steps == WARMUP_TOKENS + WINDOW_TOKENS
    )
    assert (plain.counted_steps, plain.tokens, plain.us) == (
        WINDOW_TOKENS / 2,
        WINDOW_TOKENS / 2,
        100.0 * WINDOW_TOKENS / 2,
    )


def test_a_block_of_which_nothing_was_taken_in_is_no_pair() -> None:
    interleaver = interleaver_of(PLAIN, holdout=0.9)
    play(interleaver, 400, counts=False)
    for number, played in enumerate(interleaver.rounds):
        blocks = tuple(block.block() for block in played.blocks)
        one = Round(scope="s", worker="w", life="a", number=number, time=played.time, blocks=blocks)
        assert decode_round(one.model_dump_json().encode()) == one
        assert {(b.steps, b.requests, b.tokens, b.us, b.groups) for b in blocks} == {
            (0, 0, 0.0, 0.0, ())
        }
        assert effect_of([one], CHAMPION, PLAIN) == UNKNOWN
    assert interleaver.rounds_made > 5


def test_each_step_is_in_the_round_of_its_number_and_a_cancelled_round_has_its_own() -> None:
    """So that a trial can be worked out anew from drafts, which name their round."""
    policies = {TRIAL: trial_of(0.9)}
    interleaver = interleaver_of(policies=policies, holdout=0.0)
    steps, cancelled = Counter[tuple[int, str]](), set[int]()
    for at in range(2_000):
        if at % 97 == 96:
            before = interleaver.active, interleaver.number
            policies[TRIAL] = replace(policies[TRIAL], publication=at)
            interleaver.next_variant(CHAMPION_POLICY)
            if before[0]:
                cancelled.add(before[1])
        variant = interleaver.next_variant(CHAMPION_POLICY)
        if variant is not None:
            steps[interleaver.number, variant.name] += 1
        interleaver.record_step(variant, made(1, us=100.0), True)
    told = {(r.number, b.variant.name): b.steps for r in interleaver.rounds for b in r.blocks}
    assert cancelled and not cancelled & {number for number, _ in told}
    assert told == {key: count for key, count in steps.items() if key in told}
    numbers = [r.number for r in interleaver.rounds]
    assert numbers == sorted({*range(interleaver.number + 1)} - cancelled)[: len(numbers)]


def test_a_new_champion_or_trial_ends_the_round_under_way() -> None:
    policies = {TRIAL: trial_of(0.5)}
    interleaver = interleaver_of(policies=policies, holdout=0.0)
    assert play(interleaver, 200)[-1] and interleaver.rounds_made
    policies.clear()
    assert interleaver.next_variant(CHAMPION_POLICY) is None and not interleaver.active
    assert interleaver.next_variant(CHAMPION_POLICY) is None and not interleaver.comparing
    versions = {
        (a.variant.name, a.variant.policy.version) for r in interleaver.rounds for a in r.blocks
    }
    assert versions == {(TRIAL, 9), (CHAMPION, 3)}


def test_a_side_that_failed_plays_again_with_another_policy_only() -> None:
    policies = {TRIAL: trial_of(0.5)}
    interleaver = interleaver_of(PLAIN, holdout=0.2, policies=policies)
    while (variant := interleaver.next_variant(CHAMPION_POLICY)) is None or variant.name != TRIAL:
        interleaver.record_step(variant, made(1), counts=True)
    interleaver.disable(variant)
    played = Counter(play(interleaver, 4_000))
    assert not played[TRIAL] and played[PLAIN] and interleaver.failures == {TRIAL: 1}
    policies[TRIAL] = trial_of(0.5, version=10)
    assert Counter(play(interleaver, 4_000))[TRIAL]


def test_who_drafts_pays_for_reading_his_own_text_late_and_no_others() -> None:
    """Whoever came before, and in whose steps it was read: a champion that drafts nothing for a
    while would else pay for the text of all."""
    interleaver = interleaver_of(PLAIN, SUFFIX, MODEL, holdout=0.9)
    for _ in range(8_000):
        variant = interleaver.next_variant(CHAMPION_POLICY)
        interleaver.record_step(variant, made(2, us=1_500.0, prefill_us=500.0), counts=True)
    orders = {tuple(a.variant.name for a in played.blocks) for played in interleaver.rounds}
    assert len(orders) > 10
    read = 500.0 * WINDOW_TOKENS / 2
    for block in (a for played in interleaver.rounds for a in played.blocks):
        assert block.prefill_us == pytest.approx(read if block.variant.policy.use_model else 0.0)
        assert block.us - block.prefill_us == pytest.approx(1_000 * WINDOW_TOKENS / 2)
        assert block.cost_us - block.prefill_us == pytest.approx(1_500 * WINDOW_TOKENS / 2)
    interleaver.disable(STOCK[PLAIN])  # what is under way is booked
    assert sum(s.us for s in interleaver.totals.values()) == pytest.approx(8_000 * 1_500.0)


def test_groups_beyond_the_most_are_one() -> None:
    block = BlockTotals(STOCK[PLAIN])
    for n in range(3 * MAX_GROUPS):
        block.groups.clear() if n < WARMUP_TOKENS else None
        block.position = min(block.position, WARMUP_TOKENS)
        block.add(StepOutcome(1, ("r",), 1.0, 1.0, 0.0, {(f"t{n}", ""): [1, 1]}))
    block = block.block()
    assert len(block.groups) == MAX_GROUPS
    assert sum(g.tokens for g in block.groups) == pytest.approx(block.tokens)
    assert sum(g.cost_us for g in block.groups) == pytest.approx(block.cost_us)


def test_rounds_that_nobody_fetches_are_dropped_and_counted() -> None:
    interleaver = interleaver_of(PLAIN, holdout=0.9)
    play(interleaver, 30 * (MAX_PENDING_ROUNDS + 60))
    assert (
        len(interleaver.rounds) == MAX_PENDING_ROUNDS
        and interleaver.rounds_dropped == interleaver.rounds_made - MAX_PENDING_ROUNDS > 0
    )
    blocks = sum(s.tokens for n, s in interleaver.totals.items() if n != OUTSIDE)
    assert blocks == pytest.approx(2 * WINDOW_TOKENS * interleaver.rounds_made), (
        "and summed up all the same"
    )


def effects_by_turns(seed: int, rounds: int) -> list[Effect]:
    """After each further round, of a trial over a champion that decides alike, on text that copies
    in stretches, with noise in each step."""
    rng = np.random.default_rng(seed)
    copies = np.repeat(rng.random(400) < 0.4, rng.geometric(0.1, 400))
    tokens = np.where(copies, rng.integers(3, 9, len(copies)), rng.integers(1, 3, len(copies)))
    took = (1_000.0 + 20.0 * tokens) * np.exp(rng.normal(0.0, 0.1, len(copies)))
    interleaver, at = interleaver_of(holdout=0.0, policies={TRIAL: trial_of(0.5)}, seed=seed), 0
    while len(interleaver.rounds) < rounds:
        step(interleaver, made(int(tokens[at]), float(took[at])))
        at = (at + 1) % len(tokens)
    pairs = np.array(
        [
            [(a.tokens, a.us) for a in sorted(r.blocks, key=lambda a: a.variant.name != TRIAL)]
            for r in interleaver.rounds
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
    interleaver = interleaver_of(PLAIN, holdout=0.9)
    for sessions in ("ab", "bc", "cd", "de"):
        until = interleaver.rounds_made + 5
        while interleaver.rounds_made < until:
            step(interleaver, made(2)._replace(sessions=frozenset(sessions)))
    units = [one.cluster for one in interleaver.rounds]
    first = units[0]
    assert units[:9] == [first] * 9 and units[-9:] == [units[-1]] * 9 != [first] * 9
    assert len(set(units)) == 2, "cd has none of ab, and de has one of cd"
    while interleaver.rounds_made < 220:
        step(interleaver, made(2)._replace(sessions=frozenset("f")))
    endless = {one.cluster for one in interleaver.rounds} - {*units}
    assert len(endless) == pytest.approx(200 / MAX_CLUSTER_ROUNDS, abs=1), (
        "a session without an end is many"
    )


def test_the_first_policy_plays_beside_a_trial_unless_it_is_the_champion() -> None:
    other = replace(FIRST_POLICY, threshold=7.0)
    for first, plays in ((FIRST_POLICY, False), (other, True)):
        interleaver = interleaver_of(holdout=0.0, policies={TRIAL: trial_of(0.2), FIRST: first})
        assert (FIRST in play(interleaver, 2_000)) is plays
        held_out = interleaver_of(
            PLAIN, FIRST, holdout=0.02, policies={TRIAL: trial_of(0.2), FIRST: first}
        )
        sides = Counter(play(held_out, 20_000))
        assert sides[FIRST] > sides[TRIAL] / 2, "an anchor that comes rarely decides nothing"
    unanchored = Interleaver(
        (), 0.0, {TRIAL: trial_of(0.2), FIRST: other}, other, 0, anchored=False
    )
    assert FIRST not in play(unanchored, 2_000)
