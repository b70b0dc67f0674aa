"""Acceptance rules against the target's own distribution, whatever was drafted.

Statistical tests are seeded; each fails by chance with a probability below 1e-4.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from decoder.drafting.tree import ROOT, DraftTree, chain
from decoder.engines.reference.acceptance import accept_greedy, accept_sampled, distribution
from tests.engines.chi_square import goodness_of_fit

DRAWS = 20_000


def test_greedy_follows_the_target_as_far_as_the_draft_agrees() -> None:
    assert accept_greedy(chain([4, 5, 6]), [4, 5, 9, 1]) == ([0, 1], 9)
    assert accept_greedy(chain([4, 5, 6]), [4, 5, 6, 1]) == ([0, 1, 2], 1)
    assert accept_greedy(chain([4]), [7, 0]) == ([], 7)
    assert accept_greedy(chain([]), [7]) == ([], 7)


def test_greedy_picks_the_right_branch() -> None:
    #        7 - 1
    # root <
    #        8 - 2, 8 - 1 - 5
    tree = DraftTree([7, 8, 1, 2, 1, 5], [ROOT, ROOT, 0, 1, 1, 4])
    choices = {ROOT: 8, 0: 1, 1: 1, 2: 0, 3: 0, 4: 5, 5: 3}
    assert accept_greedy(tree, [choices[n] for n in range(ROOT, 6)]) == ([1, 4, 5], 3)
    choices[1] = 9
    assert accept_greedy(tree, [choices[n] for n in range(ROOT, 6)]) == ([1], 9)


TREES = {
    "nothing": chain([]),
    "one": chain([2]),
    "unlikely": chain([3, 3, 3]),
    "likely": chain([0, 1, 0]),
    "siblings": DraftTree([1, 0, 3], [ROOT, ROOT, ROOT]),
    "everything": DraftTree([3, 2, 1, 0, 0, 1, 2, 3], [ROOT] * 4 + [3] * 4),
    "deep": DraftTree([0, 2, 1, 0, 3, 1], [ROOT, ROOT, 0, 0, 1, 2]),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_what_is_committed_has_the_targets_distribution(tree: DraftTree) -> None:
    """First two tokens, with a target that depends on the token before."""
    first = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    after = torch.tensor(
        [[0.1, 0.6, 0.1, 0.2], [0.7, 0.1, 0.1, 0.1], [0.25] * 4, [0.0, 0.0, 0.9, 0.1]],
        dtype=torch.float64,
    )
    rows = [first, *(after[token] for token in tree.tokens)]
    generator = torch.Generator().manual_seed(1)
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(DRAWS):
        path, bonus = accept_sampled(tree, torch.stack(rows), generator)
        tokens = [*(tree.tokens[node] for node in path), bonus]
        if len(tokens) == 1:
            tokens.append(int(torch.multinomial(after[bonus], 1, generator=generator)))
        counts[tokens[0], tokens[1]] += 1
    expected = {(a, b): float(first[a] * after[a, b]) for a in range(4) for b in range(4)}
    assert goodness_of_fit(counts, expected) > 1e-4


def test_a_drafted_token_is_accepted_as_often_as_the_target_would_say_it() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for token, p in enumerate(row.tolist()):
        hits = sum(
            bool(accept_sampled(chain([token]), torch.stack([row, row]), generator)[0])
            for _ in range(DRAWS)
        )
        expected = {True: p, False: 1 - p}
        assert goodness_of_fit(Counter({True: hits, False: DRAWS - hits}), expected) > 1e-4


def test_a_certain_token_is_always_accepted_and_an_impossible_one_never() -> None:
    sure = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        assert accept_sampled(chain([1]), sure, generator) == ([0], 1)
        assert accept_sampled(chain([0]), sure, generator) == ([], 1)


def test_temperature_sharpens() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert distribution(logits, 1.0)[0, 1] == pytest.approx(1 / (1 + torch.e**-1))
    assert distribution(logits, 0.5)[0, 1] == pytest.approx(1 / (1 + torch.e**-2))
