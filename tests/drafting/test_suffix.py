"""Cache drafts are the library's own; they are indexed and freed by the piece, within a budget."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.drafting.drafts import CacheDraft, common_prefix
from decoder.drafting.suffix import SuffixCache
from decoder.drafting.trees import SEGMENT, WHOLE, Local, ranges_of
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE, FLOORS, cache_key
from tests.conftest import naive_accepted_length

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
    found = cache.propose("drawing", array([1, *begin]), 60)
    cache.stop("drawing")
    return found


def shown(draft: CacheDraft | None) -> set[int]:
    """Every token that a draft shows, those of its rival among them."""
    if draft is None:
        return set()
    return {*draft.tokens, *(draft.rival.tokens if draft.rival else ())}


@settings(max_examples=80, deadline=None)
@given(earlier=tokens, prompt=tokens, output=tokens, factor=st.sampled_from([0.5, 1.0, 2.0]))
def test_the_draft_is_the_one_the_library_would_choose(
    earlier: list[int], prompt: list[int], output: list[int], factor: float
) -> None:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixCache(WorkerSettings(suffix_max_factor=factor))
    library = SuffixDecodingCache(max_tree_depth=64, max_cached_requests=-1)
    for name, begin, rest in (("before", [9], earlier), ("now", prompt, output)):
        cache.start(name, array(begin), "")
        cache.index()
        cache.extend(name, rest)
        library.start_request(name, array(begin))
        library.add_active_response(name, rest)
        if name == "before":
            cache.stop(name)
            library.stop_request(name)
    context = array(prompt + output)
    found = cache.propose("now", context, 30)
    theirs = library.speculate("now", context[-64:], max_spec_tokens=30, max_spec_factor=factor)
    if found is None:
        assert not theirs.token_ids
        return
    assert (found.tokens, found.probs) == (theirs.token_ids, theirs.probs)
    assert (found.score, found.match_len) == (theirs.score, theirs.match_len)
    if found.rival is not None:
        assert found.rival.score <= found.score and found.rival.local != found.local
        assert found.agreement == naive_accepted_length(found.tokens, found.rival.tokens)


@given(tokens, tokens)
def test_common_prefix_is_its_definition(a: list[int], b: list[int]) -> None:
    assert common_prefix(a, b) == naive_accepted_length(a, b)


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=900),
    output=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    budget=st.integers(1, 300),
    after=st.integers(0, 40),
)
def test_slices_and_output_committed_meanwhile_make_the_same_tree(
    prompt: list[int], output: list[int], budget: int, after: int
) -> None:
    """A prompt of one sequence: whatever the slices, and whenever its output comes."""
    sliced, at_once = SuffixCache(WorkerSettings()), SuffixCache(WorkerSettings())
    at_once.start("r", array(prompt), "")
    at_once.index(None)
    sliced.start("r", array(prompt), "")
    for step, token in enumerate(output):
        sliced.extend("r", [token])
        at_once.extend("r", [token])
        if step >= after:
            sliced.index(budget)
        sliced.propose("r", array([*prompt, *output[: step + 1]]), 30)  # whatever it finds
    while sliced.waiting:
        assert sliced.index(budget)
    context = array(prompt + output)
    assert sliced.propose("r", context, 30) == at_once.propose("r", context, 30)


def elsewhere(cache: SuffixCache, request: str, context: list[int]) -> CacheDraft | None:
    """A draft behind a text that the request's own does not go on to."""
    cache._active[request].reach = 64
    return cache.propose(request, array(context), 30)


def test_a_step_indexes_no_more_than_its_budget() -> None:
    cache = SuffixCache(WorkerSettings())
    for name in "ab":
        cache.start(name, array(some(1, 20_000)), name)
    assert cache.waiting == 2
    indexed = [cache.index(300) for _ in range(200) if cache.waiting]
    assert max(indexed) == 300
    assert not cache.waiting
    assert 2 * 20_000 <= sum(indexed) < 2 * 20_000 * 1.1  # the overlaps come on top


@pytest.mark.parametrize("length", [1, WHOLE, WHOLE + 1, 3 * WHOLE + 77])
def test_the_ranges_of_a_prompt_cover_it_and_its_end_comes_first(length: int) -> None:
    ranges = ranges_of(length)
    assert ranges[-1][1:] == (length, 0)
    covered = sorted(ranges)
    assert covered[0][0] == 0
    for before, then in pairwise(covered):
        assert then[0] < before[1] < then[1]
    assert len({sequence for _, _, sequence in ranges}) == len(ranges)


def test_a_long_prompt_is_copied_from_everywhere_in_it_its_end_first() -> None:
    cache, prompt = SuffixCache(WorkerSettings()), some(2, 3 * WHOLE)
    cache.start("r", array(prompt), "")
    cache.index(256 + SEGMENT)

    def found(at: int) -> list[int]:
        draft = elsewhere(cache, "r", [*prompt, *prompt[at - 20 : at]])
        return draft.tokens if draft is not None else []

    near, far = len(prompt) - 100, 1000
    assert found(near) == prompt[near : near + 30]
    assert not found(far)
    cache.index(None)
    for at in range(20, len(prompt) - 30, 13):
        copied = found(at)
        assert copied == prompt[at : at + len(copied)] and len(copied) > 20, at


def test_an_output_that_outgrows_its_sequence_is_still_found_across_the_border() -> None:
    cache, output = SuffixCache(WorkerSettings()), some(3, 3 * SEGMENT)
    cache.start("r", array([1]), "")
    cache.index()
    for at in range(0, len(output), 16):
        cache.extend("r", output[at : at + 16])
    cache.start("other", array([1]), "")
    for name in ("r", "other"):
        for at in range(20, len(output) - 30, 7):
            draft = elsewhere(cache, name, output[at - 20 : at])
            assert draft is not None and len(draft.tokens) > 20, (name, at)
            assert draft.tokens == output[at : at + len(draft.tokens)], (name, at)


def test_trees_keep_their_integrity_while_pieces_come_and_go() -> None:
    cache, rng = SuffixCache(WorkerSettings(cache_gib=2 * MIB)), np.random.default_rng(4)
    for round_ in range(10):
        for name in "abc":
            length = int(rng.integers(1, 9000))
            cache.start(name, array(rng.integers(0, 40, length)), name)
        for _ in range(int(rng.integers(1, 40))):
            for name in "abc":
                cache.extend(name, rng.integers(0, 40, int(rng.integers(0, 30))).tolist())
            cache.index()
        for name in "abc":
            active = cache._active[name]
            trees = [active.shared.tree] if active.shared else []
            trees += [active.local.tree] if active.local else []
            if round_ % 3 == 0:
                assert [tree.check_integrity() for tree in trees] == [""] * len(trees)
            cache.stop(name)
    assert cache.evicted


def test_everything_is_freed_and_the_books_are_even() -> None:
    cache = SuffixCache(WorkerSettings())
    for i in range(5):
        cache.start(str(i), array(some(i, 7000 * i + 1)), ALONE)
    cache.index(1000)
    for i in range(5):
        cache.extend(str(i), some(90 + i, 2000))
        cache.stop(str(i))
        cache.stop(str(i))  # a second time is ignored
    assert cache.held_bytes > 0
    while cache._graveyard:
        cache.index()
    assert cache.held_bytes == 0
    assert not cache._active and not cache._shared and not len(cache._shares)


@pytest.mark.parametrize("kind", ["random", "zipf", "phrases", "two", "loop"])
@pytest.mark.parametrize("length", [40, 700, 30_000])
def test_the_bytes_booked_are_no_fewer_than_the_library_counts(kind: str, length: int) -> None:
    rng = np.random.default_rng(5)
    phrases = [rng.integers(0, 5000, rng.integers(5, 40)) for _ in range(800)]
    text = {
        "random": rng.integers(0, 50_000, length),
        "zipf": np.minimum(rng.zipf(1.3, length), 49_151),
        "phrases": np.concatenate([phrases[i] for i in rng.integers(0, 800, length)])[:length],
        "two": rng.integers(0, 2, length),
        "loop": np.tile(np.arange(7), length)[:length],
    }[kind]
    cache = SuffixCache(WorkerSettings())
    cache.start("r", array(text), "t")
    cache.index(None)
    for at in range(0, length, 16):
        cache.extend("r", text[at : at + 16].tolist())
    active = cache._active["r"]
    assert active.local is not None and active.shared is not None
    counted = active.local.tree.estimate_memory() + active.shared.tree.estimate_memory()
    assert counted <= cache.held_bytes


def test_what_one_tenant_wrote_is_in_no_draft_of_another() -> None:
    secret = some(6, 40)
    cache = SuffixCache(WorkerSettings())
    finish(cache, "first", secret, "a")
    assert drawn(cache, secret[:10], "a").tokens == secret[10:]  # type: ignore[union-attr]
    cache.start("running", array([1, *secret]), "a")  # nor what it is writing or was asked
    cache.index()
    cache.extend("running", secret)
    for key in ("b", "", ALONE, cache_key("b", "s"), cache_key("a", "s")):
        for begin in range(len(secret) - 1):
            assert not shown(drawn(cache, secret[begin : begin + 10], key)) & set(
                secret[begin + 10 :]
            )


def test_a_salt_parts_the_outputs_of_one_tenant() -> None:
    secret = some(7, 40)
    cache = SuffixCache(WorkerSettings())
    finish(cache, "first", secret, cache_key("a", "s"))
    assert drawn(cache, secret[:10], cache_key("a", "s")) is not None
    assert drawn(cache, secret[:10], "a") is None
    assert drawn(cache, secret[:10], cache_key("a", "t")) is None


def test_who_stands_alone_shares_not_even_with_another_alone() -> None:
    secret = some(8, 40)
    cache = SuffixCache(WorkerSettings())
    finish(cache, "first", secret, ALONE)
    assert drawn(cache, secret[:10], ALONE) is None


def hostile_names(cache: SuffixCache) -> None:
    for i in range(10_000):
        finish(cache, "flood", some(10_000 + i, 60), f"invented{i}")


def hostile_outputs(cache: SuffixCache) -> None:
    for i in range(40):
        finish(cache, "flood", some(20_000 + i, 4000), "huge")


def hostile_prompts(cache: SuffixCache) -> None:
    for i in range(6):
        cache.start(f"flood{i}", array(some(30_000 + i, 60_000)), "long")
    for _ in range(400):
        cache.index()


def hostile_never_ending(cache: SuffixCache) -> None:
    cache.start("flood", array([1]), "endless")
    for i in range(400):
        cache.extend("flood", some(40_000 + i, 200))
        cache.index()


def hostile_salts(cache: SuffixCache) -> None:
    for i in range(3000):
        finish(cache, "flood", some(50_000 + i, 60), cache_key("salting", str(i)))


@pytest.mark.parametrize(
    "flood",
    [hostile_names, hostile_outputs, hostile_prompts, hostile_never_ending, hostile_salts],
)
def test_a_quiet_tenant_keeps_its_floor_whatever_others_bring(flood) -> None:  # type: ignore[no-untyped-def]
    budget = 32 * MIB
    cache = SuffixCache(WorkerSettings(cache_gib=budget))
    floor = int(budget * 2**30 * 7 / 8) // 2 // FLOORS
    quiet = some(9, 90)
    finish(cache, "once", quiet, "quiet")
    assert cache._shares.of("quiet") <= floor
    highest = 0
    index = cache.index

    def watched(most: int | None = 256) -> int:
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
    cache = SuffixCache(WorkerSettings(cache_gib=4 * MIB))
    outputs = [some(100 + i, 400) for i in range(60)]
    for i, output in enumerate(outputs):
        finish(cache, str(i), output, "only")
    held = [drawn(cache, output[:10], "only") is not None for output in outputs]
    assert not held[0] and held[-1]
    assert held == sorted(held)


def test_a_request_that_lost_its_tree_goes_on_without() -> None:
    cache = SuffixCache(WorkerSettings(cache_gib=2 * MIB))
    cache.start("r", array(some(1, 20_000)), "t")
    for _ in range(60):
        cache.index()
    assert cache.shed == 1
    cache.extend("r", [1, 2, 3, 1, 2])
    draft = cache.propose("r", array([1, 2, 3, 1, 2]), 10)
    assert draft is not None and not draft.local  # from its own output in the tenant's tree
    cache.stop("r")


def test_a_second_start_is_an_error_and_stopping_the_unknown_is_none() -> None:
    cache = SuffixCache(WorkerSettings())
    cache.start("r", array([1]), "")
    with pytest.raises(ValueError, match="active already"):
        cache.start("r", array([1]), "")
    cache.stop("never started")


def test_a_prompt_of_nothing_is_indexed() -> None:
    cache = SuffixCache(WorkerSettings())
    cache.start("r", array([]), "")
    assert cache.index() == 0 and not cache.waiting
    cache.extend("r", [1, 2, 1])
    assert cache.propose("r", array([1, 2, 1]), 5) is not None


def test_a_tree_indexed_in_part_is_freed_whole() -> None:
    from arctic_inference.suffix_decoding._C import SuffixTree

    local = Local(SuffixTree(64), array(some(11, 2 * WHOLE)))
    for count in (100, 500, 300):
        local.index(count)
    dead = local.dead()
    assert sum(n for _, n in dead.sequences) == dead.tokens == local.tokens
    for sequence, _ in dead.sequences:
        dead.tree.remove(sequence)
    assert dead.tree.num_seqs() == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_lookup_that_reaches_back_a_little_finds_what_one_of_64_tokens_finds(seed: int) -> None:
    """From token to token of text that copies stretches of itself, with some tokens changed."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    rng = random.Random(seed)
    text = [rng.randrange(200) for _ in range(60)]
    while len(text) < 700:
        begin = rng.randrange(len(text) - 10)
        copied = text[begin : begin + rng.randrange(1, 40)]
        text += [t if rng.random() < 0.95 else rng.randrange(200) for t in copied]
    prompt, output = text[:300], text[300:]
    cache = SuffixCache(WorkerSettings())
    library = SuffixDecodingCache(max_tree_depth=64, max_cached_requests=-1)
    cache.start("r", array(prompt), "")
    cache.index(None)
    library.start_request("r", array(prompt))
    at, short, same, scores = 0, 0, [], [0.0, 0.0]
    while at < len(output):
        committed = output[at : at + rng.randrange(1, 6)]
        at += len(committed)
        cache.extend("r", committed)
        library.add_active_response("r", committed)
        context = array(text[: 300 + at])
        short += cache._active["r"].reach < 64
        found = cache.propose("r", context, 30)
        theirs = library.speculate(
            "r",
            context[-64:],
            max_spec_tokens=30,
            max_spec_factor=WorkerSettings().suffix_max_factor,
        )
        same.append((found.tokens if found else []) == theirs.token_ids)
        scores[0] += found.score if found else 0.0
        scores[1] += theirs.score
    # Harder than recorded text, where not one differed: everything is a copy, and short.
    assert short > 100 and np.mean(same) > 0.97, np.mean(same)
    assert scores[0] > 0.995 * scores[1], scores
