"""Cache drafts are copies from a request's own text and its key's, within a budget of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.drafting.blocks import Blocks
from decoder.drafting.suffix import LAST, PAGE_BYTES, STEP_TOKENS, SuffixCache
from decoder.drafting.windows import PAGE, has_room
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE, FLOORS, cache_key
from pipelines.replay.cache_drafts import CacheDraft, propose
from tests.decoder.simulated import waiting

tokens = st.lists(st.integers(0, 4), min_size=1, max_size=60)
MIB = 1 / 1024


def array(values: list[int] | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)


def some(seed: int, count: int) -> list[int]:
    """Tokens that repeat nothing."""
    return np.random.default_rng(seed).integers(0, 2**30, count).tolist()


def finish(cache: SuffixCache, name: str, output: list[int], key: str, prompt: int = 3) -> None:
    """A whole request, its output committed eight tokens a step."""
    cache.start(name, array([7] * prompt), key)
    cache.index()
    for at in range(0, len(output), 8):
        cache.extend(name, output[at : at + 8])
        cache.index()
    cache.stop(name)


def drawn(cache: SuffixCache, begin: list[int], key: str) -> CacheDraft | None:
    """What a request of ``key`` that wrote ``begin`` is offered."""
    cache.start("drawing", array([1]), key)
    cache.index()
    cache.extend("drawing", begin)
    found = propose(cache, cache._active["drawing"], array([1, *begin]), 60)
    cache.stop("drawing")
    return found


def shown(draft: CacheDraft | None) -> set[int]:
    """Every token that a draft shows, those of its rival among them."""
    if draft is None:
        return set()
    return {*draft.tokens, *(draft.rival.tokens if draft.rival else ())}


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=400),
    output=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    budget=st.integers(1, 300),
    after=st.integers(0, 40),
)
def test_slices_and_output_committed_meanwhile_make_the_same_index(
    prompt: list[int], output: list[int], budget: int, after: int
) -> None:
    sliced, at_once = SuffixCache(WorkerSettings()), SuffixCache(WorkerSettings())
    at_once.start("r", array(prompt), "")
    at_once.index(None)
    sliced.start("r", array(prompt), "")
    for step, token in enumerate(output):
        sliced.extend("r", [token])
        at_once.extend("r", [token])
        if step >= after:
            assert sliced.index(budget) <= budget
        propose(
            sliced, sliced._active["r"], array([*prompt, *output[: step + 1]]), 30
        )  # whatever it finds
    while waiting(sliced):
        assert sliced.index(budget)
    context = array(prompt + output)
    assert propose(sliced, sliced._active["r"], context, 30) == propose(
        at_once, at_once._active["r"], context, 30
    )


def test_a_step_indexes_no_more_than_its_budget_and_the_oldest_prompt_first() -> None:
    cache = SuffixCache(WorkerSettings())
    for i, name in enumerate("abc"):
        cache.start(name, array(some(i, STEP_TOKENS)), name)
    cache.stop("b")
    for left in (2, 1, 0):
        assert waiting(cache) == left
        assert cache.index() == STEP_TOKENS * bool(left)
    assert not waiting(cache)


def test_a_long_text_is_copied_from_everywhere_in_it() -> None:
    cache, prompt, output = SuffixCache(WorkerSettings()), some(2, 6000), some(3, 1200)
    cache.start("r", array(prompt), "")
    cache.index()
    for at in range(0, len(output), 7):
        cache.extend("r", output[at : at + 7])
    cache.start("other", array([1]), "")
    for name, text in (("r", prompt), ("r", output), ("other", output)):
        for at in range(20, len(text) - 64, 13):
            draft = propose(cache, cache._active[name], array([-5, *text[at - 20 : at]]), 60)
            assert draft is not None and len(draft.tokens) > 40, (name, at)
            assert draft.tokens == text[at : at + len(draft.tokens)], (name, at)


def test_a_text_that_ends_is_not_taken_for_the_beginning_of_the_next() -> None:
    cache = SuffixCache(WorkerSettings())
    first, second = some(5, 40), some(6, 40)
    finish(cache, "a", first, "t")
    finish(cache, "b", second, "t")
    draft = drawn(cache, first[-10:-2], "t")
    assert draft is not None and draft.tokens == first[-2:]
    assert drawn(cache, first[-5:], "t") is None


def test_many_short_outputs_take_the_bytes_of_their_tokens() -> None:
    cache = SuffixCache(WorkerSettings())
    for i in range(400):
        finish(cache, str(i), some(i, 30), "t")
    assert cache.held_bytes <= 32 * 400 * 32


def test_text_comes_and_goes_and_the_books_are_even() -> None:
    cache, rng = SuffixCache(WorkerSettings(cache_gib=2 * MIB)), np.random.default_rng(4)
    for _ in range(10):
        for name in "abc":
            cache.start(name, array(rng.integers(0, 40, int(rng.integers(1, 9000)))), name)
        for _ in range(int(rng.integers(1, 40))):
            for name in "abc":
                cache.extend(name, rng.integers(0, 40, int(rng.integers(0, 300))).tolist())
            cache.index()
            assert cache.held_bytes <= 2 * 2**20
        for name in "abc":
            cache.stop(name)
            cache.stop(name)  # a second time is ignored
    assert cache.evicted
    used = np.flatnonzero(cache.pool.windows["mask"]).tolist()
    assert sorted(cache._owners) == used
    assert cache.held_bytes == (cache.pool.windows["mask"][used] + 1).sum() // PAGE * PAGE_BYTES
    while cache._shares.evict(cache._evict):
        pass
    assert cache.held_bytes == 0 and not cache.pool.windows["mask"].any()
    assert not (cache._active or cache._keys or cache._owners or cache._shares._owners)
    assert cache._blocks._free == Blocks(len(cache.pool.before))._free
    assert sorted(cache._rows) == list(range(1, next(cache._new_rows)))


def test_the_bytes_booked_are_those_of_the_arrays() -> None:
    pool = SuffixCache(WorkerSettings()).pool
    held = sum(array.nbytes for array in pool) - pool.windows.nbytes - pool.lost.nbytes
    assert held == len(pool.before) * PAGE_BYTES <= 2 * 2**30


def test_a_window_grows_without_moving_its_text() -> None:
    """No step does more for a large window than for a small one."""
    cache, text = SuffixCache(WorkerSettings(cache_gib=8 * MIB)), some(8, 40_000)
    row = cache.start("r", array([1]), "t")
    window, changed = cache.pool.windows[row], list[int]()
    for at in range(0, len(text), 8):
        before, mask = None, int(window["mask"])
        if not has_room(cache.pool, row, int(window["last"]), 8):
            before = [part.copy() for part in cache.pool[:5]]
        cache.extend("r", text[at : at + 8])
        if before is not None and window["mask"] > mask:
            pairs = zip(cache.pool[:5], before, strict=True)
            changed.append(sum((new != old).sum() * new.itemsize for new, old in pairs))
    assert len(changed) > 6 and max(changed) < 4 * PAGE_BYTES
    cache.index()
    draft = propose(cache, row, array(text[5000:5010]), 10)
    assert draft is not None and draft.tokens == text[5010:5020]


@pytest.mark.parametrize("length", [1024, 1000, 7])
def test_blocks_split_and_joined_never_overlap(length: int) -> None:
    blocks, rng, taken = Blocks(length), np.random.default_rng(7), list[tuple[int, int]]()
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            blocks.free(*taken.pop(int(rng.integers(len(taken)))))
        size = int(rng.integers(0, 8))
        if (begin := blocks.allocate(size)) >= 0:
            taken.append((begin, size))
            assert begin % (1 << size) == 0
        cells = [cell for begin, size in taken for cell in range(begin, begin + (1 << size))]
        assert len(cells) == len(set(cells)) and max(cells, default=0) < length
    for each in taken:
        blocks.free(*each)
    assert blocks._free == Blocks(length)._free


def test_a_request_for_which_there_is_no_room_keeps_its_newest_text() -> None:
    cache, prompt = SuffixCache(WorkerSettings(cache_gib=1 * MIB)), some(1, 60_000)
    cache.start("r", array(prompt), "t")
    cache.index(None)
    assert cache.shed and cache.held_bytes <= 2**20
    near = propose(cache, cache._active["r"], array(prompt[-5000:-4990]), 10)
    assert near is not None and near.tokens == prompt[-4990:-4980]
    assert propose(cache, cache._active["r"], array(prompt[5000:5010]), 10) is None
    cache.extend("r", [1, 2, 3, 1, 2])
    draft = propose(cache, cache._active["r"], array([1, 2, 3, 1, 2]), 10)
    assert draft is not None and draft.tokens[0] == 3


def test_texts_that_were_long_leave_room_for_those_that_come() -> None:
    """Each keeps the buckets of a text that filled the pool, and the next one finds fewer."""
    cache = SuffixCache(WorkerSettings(cache_gib=MIB / 2))
    for i in range(16):
        cache.start(str(i), array([1]), cache_key("t", str(i)))
        text = some(i, 20_000)
        for at in range(0, len(text), 400):
            cache.extend(str(i), text[at : at + 400])
            cache.index()
        draft = propose(cache, cache._active[str(i)], array(text[-60:-50]), 10)
        assert draft is not None and draft.tokens == text[-50:-40]
    for i in range(16):
        cache.stop(str(i))
    finish(cache, "after", some(20, 400), "t")
    assert drawn(cache, some(20, 400)[:10], "t") is not None


@pytest.mark.parametrize("writer", ["a", cache_key("a", "s"), ALONE])
def test_what_one_tenant_wrote_is_in_no_draft_of_another(writer: str) -> None:
    """Nor what it wrote under a salt; and who stands alone shares not even with another alone."""
    secret = some(6, 40)
    cache = SuffixCache(WorkerSettings())
    finish(cache, "first", secret, writer)
    mine = drawn(cache, secret[:10], writer)
    assert mine is None if writer == ALONE else mine is not None and mine.tokens == secret[10:]
    cache.start("running", array([1, *secret]), writer)  # nor what it is writing or was asked
    cache.index()
    cache.extend("running", secret)
    others = {"a", "b", "", ALONE, cache_key("b", "s"), cache_key("a", "s"), cache_key("a", "t")}
    for key in others - ({writer} - {ALONE}):
        for begin in range(len(secret) - 1):
            assert not shown(drawn(cache, secret[begin : begin + 10], key)) & set(
                secret[begin + 10 :]
            )


def hostile_names(cache: SuffixCache) -> None:
    for i in range(3_500):
        finish(cache, "flood", some(10_000 + i, 60), f"invented{i}")


def hostile_outputs(cache: SuffixCache) -> None:
    for i in range(100):
        finish(cache, "flood", some(20_000 + i, 4000), "huge")


def hostile_prompts(cache: SuffixCache) -> None:
    for i in range(30):
        cache.start(f"flood{i}", array(some(30_000 + i, 60_000)), "long")
    for _ in range(400):
        cache.index()


def hostile_never_ending(cache: SuffixCache) -> None:
    cache.start("flood", array([1]), "endless")
    for i in range(2_000):
        cache.extend("flood", some(40_000 + i, 200))
        cache.index()


def hostile_salts(cache: SuffixCache) -> None:
    for i in range(4_000):
        finish(cache, "flood", some(50_000 + i, 60), cache_key("salting", str(i)))


@pytest.mark.parametrize(
    "flood", [hostile_names, hostile_outputs, hostile_prompts, hostile_never_ending, hostile_salts]
)
def test_a_quiet_tenant_keeps_its_floor_whatever_others_bring(flood) -> None:  # type: ignore[no-untyped-def]
    budget = 8 * MIB
    cache = SuffixCache(WorkerSettings(cache_gib=budget))
    floor = int(budget * 2**30) // 2 // FLOORS
    quiet = some(9, 90)
    finish(cache, "once", quiet, "quiet")
    assert cache._shares.of("quiet") <= floor
    highest = 0
    index = cache.index

    def watched(most: int | None = 4096) -> int:
        nonlocal highest
        done = index(most)
        highest = max(highest, cache.held_bytes)
        return done

    cache.index = watched  # type: ignore[method-assign]
    flood(cache)
    assert cache.evicted or cache.shed
    assert highest <= budget * 2**30
    found = drawn(cache, quiet[:10], "quiet")
    assert found is not None and found.tokens == quiet[10:50]


def test_a_floor_goes_to_another_only_after_an_hour_without_a_request() -> None:
    now = [0.0]
    cache = SuffixCache(WorkerSettings(cache_gib=32 * MIB), clock=lambda: now[0])
    for i in range(FLOORS):
        finish(cache, "r", some(i, 20), f"first{i}")
    finish(cache, "r", some(1000, 20), "late")
    assert not cache._shares._owners["late"].has_floor
    now[0] = 4000.0
    finish(cache, "r", some(1, 20), "first1")
    finish(cache, "r", some(1000, 20), "late")
    assert cache._shares._owners["late"].has_floor
    assert cache._shares._owners["first1"].has_floor
    assert not cache._shares._owners["first0"].has_floor


def test_of_one_tenant_the_oldest_output_gives_way_first() -> None:
    cache = SuffixCache(WorkerSettings(cache_gib=MIB / 2))
    outputs = [some(100 + i, 400) for i in range(60)]
    for i, output in enumerate(outputs):
        finish(cache, str(i), output, "only")
    held = [drawn(cache, output[:10], "only") is not None for output in outputs]
    assert not held[0] and held[-1]
    assert held == sorted(held)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 600), st.booleans()), min_size=20, max_size=80
    )
)
def test_no_draft_shows_what_another_key_wrote(steps: list[tuple[int, int, bool]]) -> None:
    """Windows grow, are halved and leave their memory to others, with tokens that all use."""
    cache, rng = SuffixCache(WorkerSettings(cache_gib=MIB / 8)), np.random.default_rng(4)
    keys = ["a", "b", cache_key("a", "s"), ALONE]
    active = dict[str, np.ndarray]()

    def some_of(number: int, count: int) -> np.ndarray:
        own = rng.integers(100 * number + 100, 100 * number + 103, count)
        return np.where(np.arange(count) % 3, rng.integers(0, 2, count), own).astype(np.int32)

    for number, count, stops in steps:
        name, key = str(number), keys[number % 4]
        # prompts are the request's own, outputs its key's
        if name not in active:
            active[name] = some_of(number + 10, count)
            cache.start(name, active[name], key)
        elif stops:
            cache.stop(name)
            del active[name]
        else:
            text = some_of(number % 4 if key != ALONE else number, count)
            cache.extend(name, text.tolist())
            active[name] = np.append(active[name], text)
        cache.index(200)
        assert cache.held_bytes <= 2**20 // 8
        for reader, text in active.items():
            at = int(reader)
            mine = {at + 11, at + 1 if keys[at % 4] == ALONE else at % 4 + 1, 0}
            for context in ([0, 1], [1, 1], [0], text[-2:].tolist()):
                tokens = shown(propose(cache, cache._active[reader], array(context), 30))
                assert {token // 100 for token in tokens} <= mine


def test_a_window_of_too_many_tokens_begins_anew() -> None:
    cache, text = SuffixCache(WorkerSettings()), some(1, 300)
    finish(cache, "a", some(2, 100), "t")
    cache.start("b", array([1]), "t")
    cache.extend("b", text[:100])
    number = int(cache.pool.windows["shared"][cache._active["b"]])
    window = cache.pool.windows[number]
    window["end"] = window["first"] = window["grow_at"] = LAST - PAGE
    for at in range(100, 300, 10):
        cache.extend("b", text[at : at + 10])
    assert window["end"] < LAST - PAGE
    cache.stop("b")
    draft = drawn(cache, text[260:270], "t")
    assert draft is not None and draft.tokens == text[270:300]
    assert drawn(cache, text[20:30], "t") is None


def test_prompts_of_requests_that_ended_before_they_were_indexed_are_not_indexed() -> None:
    """Their windows may be others' by then, the outputs of a key among them."""
    cache = SuffixCache(WorkerSettings())
    for name in ("a1", "a2"):
        cache.start(name, array(some(1, 40)), "a")
    for name in ("a1", "a2"):
        cache.stop(name)
    cache.start("b", array(some(2, 40)), "b")
    cache.extend("b", [1, 2, 3])
    cache.stop("b")
    assert cache.index() == 0, "nobody waits"
    cache.start("next", array(some(3, 40)), "b")
    assert waiting(cache) == 1 and cache.index() == 40 and waiting(cache) == 0
