"""Features are what their names say, the same for a batch as for each draft alone."""

from __future__ import annotations

import numpy as np

from decoder.contracts.features import FEATURES, NUM_FEATURES, TOKEN_CLASSES
from decoder.core.payoff.featurize import DraftState, featurize
from decoder.core.payoff.memory import SLOTS, History, TenantMemory, memory_keys
from decoder.core.payoff.token_classes import token_class_table
from decoder.drafting.drafts import CacheDraft, common_prefix


def state(
    tokens: list[int], payoffs: tuple[int, ...] = (), rival: list[int] | None = None
) -> DraftState:
    history = History()
    for payoff in payoffs:
        history.learn(payoff, length=10, generated=6)
    for cache in (True, False, False, False):
        history.took(cache)
    probs = [0.9 * 0.5**i for i in range(len(tokens))]
    other = None if rival is None else CacheDraft(rival, [0.5] * len(rival), 1.5, 3, False)
    agreement = 0 if rival is None else common_prefix(tokens, rival)
    draft = CacheDraft(tokens, probs, sum(probs), 5, True, other, agreement)
    return DraftState(draft, 99, 10, 40, 3, history, TenantMemory(), memory_keys([7, 8], tokens))


def named(row: np.ndarray) -> dict[str, float]:
    return dict(zip(FEATURES, row.tolist(), strict=True))


def test_named_values(token_classes: np.ndarray) -> None:
    (row,) = featurize([state([1, 2, 3], payoffs=(4, 0, 9))], token_classes)
    values = named(row)
    assert values["draft_len"] == 3 and values["match_len"] == 5
    assert np.isclose(values["last_prob"], 0.225) and np.isclose(values["prob_2"], 0.45)
    assert values["prob_4"] == 0.0
    assert np.isclose(values["log_prompt_len"], np.log(100))
    assert np.isclose(values["log_since_break"], np.log(1 + 10 - 6))
    assert values["relative_position"] == 0.25 and values["cache_share"] == 0.25
    last = [values[f"payoff_{name}"] for name in ("last", "2nd_last", "3rd_last")]
    assert last == [9, 0, 4]
    assert values["payoff_max"] == 9 and np.isclose(values["payoff_mean"], 13 / 3)
    assert values["streak"] == 3
    for index, name in enumerate(TOKEN_CLASSES):
        assert np.isclose(values[f"share_{name}"], token_classes[[1, 2, 3], index].mean())
        assert values[f"first_{name}"] == token_classes[1, index]


def test_what_the_other_tree_says(token_classes: np.ndarray) -> None:
    rows = featurize(
        [state([1, 2, 3]), state([1, 2, 3], rival=[1, 2]), state([1, 2], rival=[4])], token_classes
    )
    alone, agreeing, differing = map(named, rows)
    assert alone["log_rival_len"] == alone["disagree"] == alone["log_agreement"] == 0
    assert np.isclose(agreeing["log_agreement"], np.log(3)) and agreeing["disagree"] == 0
    assert np.isclose(agreeing["agreement_share"], 2 / 3)
    assert differing["disagree"] == 1 and differing["rival_prob_1"] == 0.5


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


def test_a_memory_tells_what_drafts_did_after_the_same_tokens() -> None:
    memory = TenantMemory()
    here, elsewhere = memory_keys([1, 2], [3, 4]), memory_keys([5, 6], [3, 4])
    unknown = memory.recall(here)
    assert unknown[2] == 0.0
    for _ in range(10):
        memory.learn(here, accepted=20, length=20)
        memory.learn(elsewhere, accepted=0, length=20)
    draft, context = memory.recall(here)[:3], memory.recall(here)[3:6]
    assert context[0] > 2.4 > unknown[0] and context[1] > 0.8
    assert 0.2 < draft[1] < 0.8  # the draft alone has seen both
    assert memory.recall(memory_keys([9, 9], [9])) == unknown


def test_a_memory_is_bounded() -> None:
    memory = TenantMemory()
    for token in range(3 * SLOTS):
        memory.learn(memory_keys([token], [token]), 1, 2)
    assert all(len(table) <= SLOTS for table in memory._tables)


def test_a_request_history_forgets_at_its_own_paces() -> None:
    history = History()
    for _ in range(60):
        history.learn(0, 5, 1)
    slow = history.slow
    for _ in range(4):
        history.learn(5, 5, 9)
    assert history.fast > 1.2 > history.slow > slow and history.broke_at == 1
