"""The match finder finds what a search through all text finds, and nothing of another index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from decoder.drafting.matches import (
    BACK,
    FULL,
    MOST,
    WORK,
    Limits,
    Written,
    draft,
    predicted,
    scratch_for,
)
from decoder.drafting.windows import ORDERS, PAGE, new_pool, restart, write

DEPTH = 64
WINDOWS = 2


class Texts:
    """Windows in a pool, with free blocks behind them, and the same texts in lists."""

    def __init__(self, pages: int = 64) -> None:
        self.pool, slots = new_pool(9 * WINDOWS * pages, WINDOWS + 1), pages * PAGE
        for index in range(WINDOWS):
            window = self.pool.windows[index + 1]
            window["blocks"], window["mask"] = index * pages, slots - 1
            restart(self.pool, index + 1)
        self.free = WINDOWS * slots
        self.texts: dict[tuple[int, int], list[int]] = {}
        self.positions: dict[tuple[int, int], list[int]] = {}
        self.written = list[tuple[int, int, int]]()  # window, text and place, in order

    def write(self, index: int, number: int, tokens: list[int]) -> None:
        """To text ``number`` of a window."""
        positions = self.positions.setdefault((index, number), [0])
        text = self.texts.setdefault((index, number), [])
        for token in tokens:
            one = np.array([token], np.int32)
            positions.append(write(self.pool, index + 1, positions[-1], one, True))
            self.written.append((index, number, len(text)))
            text.append(token)
        if number == 0:
            window = self.pool.windows[index + 1]
            window["last"] = window["linked"] = positions[-1]

    def double(self, index: int) -> None:
        window = self.pool.windows[index + 1]
        slots = int(window["mask"]) + 1
        laps = -(-(int(window["end"]) - PAGE) // slots)
        if self.free + slots <= len(self.pool.text) and (laps % 2 or not laps):
            window["first"] = max(window["first"], (laps - 1) * slots + PAGE)
            size = (slots // PAGE).bit_length()
            window["blocks"][size], window["mask"] = (self.free - slots) // PAGE, 2 * slots - 1
            self.free += slots

    def drafts(
        self,
        contexts: list[list[int]],
        indexes: tuple[int, ...] = (0,),
        most: int = 64,
        limits: tuple[float, float, float] = (4.0, 0.0, 0.1),
    ) -> tuple[list[tuple[list[int], list[float], int, float]], int]:
        """Of each context and window tokens, probabilities, match and score; and the work."""
        found, work = list[tuple[list[int], list[float], int, float]](), 0
        for context in contexts:
            for index in indexes:
                tokens, probs = np.zeros(64, np.int32), np.zeros(64, np.float32)
                size, match, score, looked = draft(
                    self.pool, index + 1, np.array(context[-BACK:], np.int32),
                    Limits(DEPTH, most, *limits), Written(tokens, probs), scratch_for(64),
                )  # fmt: skip
                found.append((tokens[:size].tolist(), probs[:size].tolist(), match, score))
                work += looked
        return found, work

    def naive(
        self, context: list[int], index: int, most: int, limits: tuple[float, float, float]
    ) -> tuple[list[int], list[float], int, float]:
        """The draft by its definition."""
        factor, offset, least = limits
        context = context[-BACK:]
        best: tuple[list[int], list[float], int, float] = ([], [], 0, 0.0)
        for match in range(min(len(context), BACK, DEPTH), 0, -1):
            limit = min(most, int(max(match * factor + offset + 1e-6, 0)), DEPTH - match)
            tokens: list[int] = []
            probs: list[float] = []
            score, prob = 0.0, 1.0
            alive = self._occurrences(context, index, match)
            while len(tokens) < limit:
                votes = [
                    text[at + 1 + len(tokens)]
                    for text, at in alive
                    if at + 1 + len(tokens) < len(text)
                ]
                if not votes:
                    break
                token = max(dict.fromkeys(votes), key=votes.count)  # the newest of equals
                prob *= votes.count(token) / len(votes if tokens else alive)
                if prob < least:
                    break
                alive = [
                    (text, at)
                    for text, at in alive
                    if text[at + 1 + len(tokens) : at + 2 + len(tokens)] == [token]
                ]
                tokens.append(token)
                probs.append(prob)
                score += prob
            if score > best[3]:
                best = tokens, probs, match, score
        return best

    def _occurrences(
        self, context: list[int], index: int, match: int
    ) -> list[tuple[list[int], int]]:
        order = max(g for g in ORDERS if g <= match)
        found: list[tuple[list[int], int]] = []
        asked = full = 0
        last, first = -FULL, self.pool.windows["first"][index + 1]
        for window, number, place in reversed(self.written):
            position = self.positions[window, number][place + 1]
            if window != index or position < first:
                continue
            lost = sum(p < first for p in self.positions[window, number][1:])
            text, at = self.texts[window, number][lost:], place - lost
            if text[max(at + 1 - order, 0) : at + 1] != context[-order:]:
                continue
            if abs(position - last) < FULL:
                continue
            if match >= ORDERS[-1] and at + 1 >= BACK and text[at + 1 - BACK : at + 1] == context:
                full, last = full + 1, position
            asked += 1
            if at + 1 >= match and text[at + 1 - match : at + 1] == context[-match:]:
                found.append((text, at))
            if asked == MOST or full == FULL:
                break
        return found


pieces = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 2),
        st.one_of(
            st.lists(st.integers(0, 3), min_size=1, max_size=30),
            st.builds(lambda t, n: t * n, st.lists(st.integers(0, 9), min_size=1, max_size=9),
                      st.integers(1, 30)),
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip
limited = st.tuples(
    st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([-1.0, 0.0, 2.0]), st.sampled_from([0.0, 0.1])
)


@pytest.mark.parametrize("pages", [4, 64])
@settings(max_examples=100, deadline=None)
@given(pieces, limited, st.integers(1, 64))
def test_a_draft_is_its_definition(
    pages: int,
    written: list[tuple[int, int, list[int], bool]],
    limits: tuple[float, float, float],
    most: int,
) -> None:
    """Whatever a small window of one text has overwritten, and whenever it grew."""
    texts = Texts(pages)
    for index, number, tokens, grows in written:
        texts.write(index, number if pages > 4 else 0, tokens)
        if grows:
            texts.double(index)
    for context in list(texts.texts.values())[:3]:
        for index in range(WINDOWS):
            ((tokens, probs, match, score),), work = texts.drafts([context], (index,), most, limits)
            assume(work < WORK)
            expected = texts.naive(context, index, most, limits)
            assert (tokens, match, score) == (expected[0], *expected[2:])
            assert probs == pytest.approx(expected[1], rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 200).map(lambda n: list(range(n))) | st.lists(st.integers(0, 2), min_size=1),
    st.sampled_from([0.0, 0.02]), st.integers(0, 2**31),
)  # fmt: skip
def test_text_that_loops_takes_bounded_work(loop: list[int], noise: float, seed: int) -> None:
    texts, rng = Texts(pages=128), np.random.default_rng(seed)
    text = np.tile(loop, 12_000 // len(loop))
    text = np.where(rng.random(len(text)) < noise, rng.integers(0, 3, len(text)), text).tolist()
    texts.write(0, 0, text)
    ((tokens, *_),), work = texts.drafts([text])
    assert work < WORK + MOST * (BACK + DEPTH)
    if not noise:
        assert tokens == (loop * 64)[: len(tokens)] and len(tokens) > 20 and work < 1500


def test_text_overwritten_is_forgotten_and_what_is_kept_is_found() -> None:
    pages = 16
    texts, rng = Texts(pages), np.random.default_rng(3)
    text = rng.integers(0, 2**30, 60 * PAGE).tolist()
    for at in range(0, len(text), 32):
        texts.write(0, 0, text[at : at + 32])
        for back in range(100, at, 333):
            place = at + 32 - back
            ((tokens, *_),), _ = texts.drafts([text[place - 12 : place]])
            if (place - 12) // PAGE > at // PAGE - pages:
                assert tokens == text[place : place + 48][: len(tokens)] and tokens, (at, back)
            if place + 64 < (at // PAGE - pages + 1) * PAGE:
                assert tokens == [], (at, back)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_drafts_are_as_good_as_those_of_suffix_trees(factor: float) -> None:
    """Cycles, every draft verified, on text that copies stretches of itself with changes."""
    trees = pytest.importorskip(
        "arctic_inference.suffix_decoding._C",
        reason="stock suffix decoding is not installed: make rival builds it",
    )
    rng, cycles = np.random.default_rng(6), [0, 0]
    for _ in range(6):
        text = rng.integers(0, 200, 60).tolist()
        while len(text) < 1500:
            begin = int(rng.integers(len(text) - 10))
            copied = np.array(text[begin : begin + int(rng.integers(1, 60))])
            changed = rng.random(len(copied)) < 0.04
            text += np.where(changed, rng.integers(0, 200, len(copied)), copied).tolist()
        texts, tree = Texts(), trees.SuffixTree(DEPTH)
        texts.write(0, 0, text[:300])
        tree.extend(0, text[:300])
        for which in range(2):
            at = 300
            while at < len(text):
                if which:
                    seen = np.array(text[at - DEPTH : at], np.int32)
                    draft = tree.speculate_ndarray(seen, 64, factor, 0.0, 0.1, False).token_ids
                else:
                    ((draft, *_),), _ = texts.drafts([text[:at]], limits=(factor, 0.0, 0.1))
                accepted = next(
                    (i for i, (a, b) in enumerate(zip(draft, text[at:], strict=False)) if a != b),
                    min(len(draft), len(text) - at),
                )
                committed = text[at : at + accepted + 1]
                tree.extend(0, committed) if which else texts.write(0, 0, committed)
                at += len(committed)
                cycles[which] += 1
    assert cycles[0] < 1.03 * cycles[1], cycles


@given(st.lists(st.integers(0, 3), min_size=4, max_size=300), st.integers(1, 40))
@settings(max_examples=100)
def test_predicted_tokens_are_counted_as_by_their_definition(text: list[int], last: int) -> None:
    texts = Texts()
    texts.write(0, 0, text)
    naive = 0
    for at in range(max(len(text) - last, 1), len(text)):
        before = text[max(at - 3, 0) : at]
        places = [i for i in range(3, at) if len(before) == 3 and text[i - 3 : i] == before]
        naive += bool(places) and text[places[-1]] == text[at]
    assert predicted(texts.pool, 1, last) == naive
