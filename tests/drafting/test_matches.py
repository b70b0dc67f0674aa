"""The match finder finds what a search through all text finds, and nothing of another index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from decoder.drafting.drafts import Limits
from decoder.drafting.matches import BACK, FULL, MOST, WORK, Written, draft, foretold, scratch_for
from decoder.drafting.pages import ORDERS, PAGE, append, give_page, new_pool, slot_before

DEPTH = 64


class Texts:
    """One index and its streams in a pool, and the same text in lists."""

    def __init__(self, pages: int = 400, buckets: int = 256) -> None:
        self.pool = new_pool(pages + 1, 4 * buckets, 5)
        for index in range(4):
            row = self.pool.indexes[index + 1]
            row["begin"], row["mask"] = index * buckets, buckets - 1
        self.streams: dict[tuple[int, int], list[int]] = {}
        self.written: list[
            tuple[int, int, int, int]
        ] = []  # index, stream, place and slot, in order
        self.pages: dict[tuple[int, int], int] = {}

    def write(self, index: int, stream: int, tokens: list[int]) -> None:
        text = self.streams.setdefault((index, stream), [])
        page = self.pages.get((index, stream), 0)
        page = append(self.pool, index + 1, page, np.array(tokens, np.int32))
        self.pages[index, stream] = page
        slot, slots = page * PAGE + self.pool.pages["filled"][page] - 1, []
        for _ in tokens:
            slots.append(slot)
            slot = slot_before(self.pool.pages, slot)
        for token, slot in zip(tokens, reversed(slots), strict=True):
            self.written.append((index, stream, len(text), slot))
            text.append(token)

    def drafts(
        self,
        contexts: list[list[int]],
        indexes: tuple[int, ...] = (0,),
        most: int = 64,
        limits: tuple[float, float, float] = (4.0, 0.0, 0.1),
    ) -> tuple[list[tuple[list[int], list[float], int, float]], int]:
        """Of each context and index tokens, probabilities, match and score; and the work."""
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
        last = -FULL
        for owner, stream, at, slot in reversed(self.written):
            text = self.streams[owner, stream]
            if owner != index or text[max(at + 1 - order, 0) : at + 1] != context[-order:]:
                continue
            if abs(slot - last) < FULL:
                continue
            if match >= ORDERS[-1] and at + 1 >= BACK and text[at + 1 - BACK : at + 1] == context:
                full, last = full + 1, slot
            asked += 1
            if at + 1 >= match and text[at + 1 - match : at + 1] == context[-match:]:
                found.append((text, at))
            if asked == MOST or full == FULL:
                break
        return found


def free_pages(texts: Texts) -> int:
    counts = texts.pool.counts[0]
    return int(counts["free"] + len(texts.pool.pages) - counts["fresh"])


pieces = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 2),
        st.one_of(
            st.lists(st.integers(0, 3), min_size=1, max_size=30),
            st.builds(lambda t, n: t * n, st.lists(st.integers(0, 9), min_size=1, max_size=9),
                      st.integers(1, 9)),
        ),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip
limited = st.tuples(
    st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([-1.0, 0.0, 2.0]), st.sampled_from([0.0, 0.1])
)


@settings(max_examples=150, deadline=None)
@given(pieces, limited, st.integers(1, 64))
def test_a_draft_is_its_definition(
    written: list[tuple[int, int, list[int]]], limits: tuple[float, float, float], most: int
) -> None:
    texts = Texts()
    for index, stream, tokens in written:
        texts.write(index, stream, tokens)
    for context in list(texts.streams.values())[:3]:
        for index in (0, 1):
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
    texts, rng = Texts(pages=100), np.random.default_rng(seed)
    text = np.tile(loop, 12_000 // len(loop))
    text = np.where(rng.random(len(text)) < noise, rng.integers(0, 3, len(text)), text).tolist()
    texts.write(0, 0, text)
    ((tokens, *_),), work = texts.drafts([text])
    assert work < WORK + MOST * (BACK + DEPTH)
    if not noise:
        assert tokens == (loop * 64)[: len(tokens)] and len(tokens) > 20 and work < 1500


def test_pages_written_over_are_forgotten_and_what_is_kept_is_found() -> None:
    pages = 16
    texts, rng = Texts(pages), np.random.default_rng(3)
    text = rng.integers(0, 2**30, 60 * PAGE).tolist()
    page, oldest = 0, 0
    order: list[int] = []
    for at in range(0, len(text), 32):
        if not free_pages(texts) and at % PAGE == 0:
            give_page(texts.pool, order[oldest])
            oldest += 1
        page = append(texts.pool, 1, page, np.array(text[at : at + 32], np.int32))
        if page not in order[oldest:]:
            order.append(page)
        for back in range(100, min(at, 40 * PAGE), 333):
            place = at + 32 - back
            ((tokens, *_),), _ = texts.drafts([text[place - 12 : place]])
            kept = at // PAGE - place // PAGE < pages and at // PAGE - (place - 12) // PAGE < pages
            if kept:
                assert tokens == text[place : place + 48][: len(tokens)] and tokens, (at, back)
            if place + 64 < (at // PAGE - pages + 1) * PAGE:
                assert tokens == [], (at, back)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=20, max_size=60))
def test_no_index_shows_what_another_wrote(written: list[tuple[int, int]]) -> None:
    """Pages go from one to the other, and tokens that both use lead to those that only one does."""
    texts, rng = Texts(pages=8, buckets=16), np.random.default_rng(4)
    streams = dict.fromkeys(range(4), 0)
    held: list[tuple[int, int]] = []
    for index, count in written:
        if rng.random() < 0.2 and streams[index]:
            closed = texts.pool.counts["clock"][0]
            texts.pool.pages["closed"][streams[index]] = closed
            streams[index] = 0
        for _ in range(0, count, 16):
            while not free_pages(texts):
                gone = held.pop(0)
                give_page(texts.pool, gone[1])
                if streams[gone[0]] == gone[1]:
                    streams[gone[0]] = 0
            own = rng.integers(100 * (index + 1), 100 * (index + 1) + 3, 16)
            tokens = np.where(np.arange(16) % 3, rng.integers(0, 2, 16), own).astype(np.int32)
            streams[index] = append(texts.pool, index + 1, streams[index], tokens)
            if (index, streams[index]) not in held:
                held.append((index, streams[index]))
        for context in ([0, 1], [1, 1], [0], [own[-1], 0]):
            for reader in range(4):
                ((shown, *_),), _ = texts.drafts([[int(t) for t in context]], (reader,))
                assert all(t < 2 or t // 100 == reader + 1 for t in shown)


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
def test_what_the_text_foretold_is_counted_as_by_its_definition(text: list[int], last: int) -> None:
    texts = Texts(buckets=1024)
    texts.write(0, 0, text)
    texts.pool.indexes["own"][1] = texts.pages[0, 0]
    naive = 0
    for at in range(max(len(text) - last, 1), len(text)):
        before = text[max(at - 3, 0) : at]
        places = [i for i in range(3, at) if len(before) == 3 and text[i - 3 : i] == before]
        naive += bool(places) and text[places[-1]] == text[at]
    assert foretold(texts.pool, 1, last) == naive
