"""Features are what their names say, the same for a batch as for each draft alone."""

from __future__ import annotations

import numpy as np

from decoder.contracts.features import FEATURES, NUM_FEATURES, TOKEN_CLASSES
from decoder.drafting.suffix import CacheDraft
from decoder.payoff.featurize import DraftState, History, featurize
from decoder.payoff.token_classes import token_class_table


def state(tokens: list[int], payoffs: tuple[int, ...] = ()) -> DraftState:
    history = History()
    history.payoffs.extend(payoffs)
    history.cache_cycles.extend([True, False, False, False])
    probs = [0.9 * 0.5**i for i in range(len(tokens))]
    return DraftState(CacheDraft(tokens, probs, sum(probs), 5), 99, 10, 40, 3, history)


def test_named_values(token_classes: np.ndarray) -> None:
    (row,) = featurize([state([1, 2, 3], payoffs=(4, 0, 9))], token_classes)
    named = dict(zip(FEATURES, row.tolist(), strict=True))
    assert named["draft_len"] == 3 and named["match_len"] == 5
    assert np.isclose(named["last_prob"], 0.225)
    assert np.isclose(named["log_prompt_len"], np.log(100))
    assert named["relative_position"] == 0.25 and named["cache_share"] == 0.25
    assert (named["payoff_last"], named["payoff_2nd_last"], named["payoff_3rd_last"]) == (9, 0, 4)
    assert named["payoff_max"] == 9 and np.isclose(named["payoff_mean"], 13 / 3)
    assert named["streak"] == 3
    for index, name in enumerate(TOKEN_CLASSES):
        assert np.isclose(named[f"share_{name}"], token_classes[[1, 2, 3], index].mean())
        assert named[f"first_{name}"] == token_classes[1, index]


def test_a_batch_is_its_rows(token_classes: np.ndarray) -> None:
    states = [state([1]), state([2, 3], (1,)), state([4] * 10, tuple(range(12)))]
    together = featurize(states, token_classes)
    alone = np.concatenate([featurize([s], token_classes) for s in states])
    assert np.array_equal(together, alone) and together.shape == (3, NUM_FEATURES)
    assert featurize([], token_classes).shape == (0, NUM_FEATURES)


def test_token_classes_of_byte_level_and_sentencepiece_entries() -> None:
    vocabulary = ["Ġthe", "▁the", "Ċ", "<0x0A>", "(", "],", "7", ".", None, "word"]
    table = token_class_table(vocabulary)
    names = [
        {c for c, on in zip(TOKEN_CLASSES, row, strict=True) if on} for row in table.astype(bool)
    ]
    assert names[0] == names[1] == {"whitespace"}
    assert names[2] == {"newline"} and "newline" in names[3]
    assert names[4] == {"bracket"} and names[5] == {"bracket", "delimiter"}
    assert names[6] == {"digit"} and names[7] == {"punctuation"}
    assert names[8] == names[9] == set()
