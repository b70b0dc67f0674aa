"""Tree verification: as if every branch had been read alone, and nothing of the others remains."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoder.drafting.tree import ROOT, DraftTree, chain
from decoder.engines.reference.kv_cache import KVCache
from decoder.engines.reference.packed import PackedLinear, pack
from decoder.engines.reference.target import Target
from tests.engines.tiny import Family, tiny_prompt, tiny_target

LISTENS = (1, 2, 4)


def random_tree(seed: int, nodes: int = 14) -> DraftTree:
    rng = random.Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < nodes:
        parent, token = rng.randrange(ROOT, len(tokens)), rng.randrange(12)
        siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        if token not in siblings:
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tokens, parents)


def read_alone(target: Target, text: list[int]) -> tuple[Tensor, Tensor, KVCache]:
    """Logits, drafter's view, and cache of a text read from nothing."""
    cache = KVCache()
    read = target.prefill(text, cache)
    assert read.aux is not None
    return read.logits[-1], read.aux[-1], cache


def assert_same_cache(cache: KVCache, other: KVCache) -> None:
    assert cache.length == other.length
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        n = cache.length
        torch.testing.assert_close(mine.keys[..., :n, :], theirs.keys[..., :n, :])
        torch.testing.assert_close(mine.values[..., :n, :], theirs.values[..., :n, :])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_each_branch_is_read_as_if_it_were_alone(family: Family, seed: int) -> None:
    target = Target(tiny_target(seed, family), LISTENS)
    prompt, last, tree = tiny_prompt(seed), 3, random_tree(seed)
    cache = KVCache()
    target.prefill(prompt, cache)
    read = target.verify(last, tree, cache)
    assert read.aux is not None and read.logits.shape[0] == 1 + len(tree)
    for node in range(ROOT, len(tree)):
        logits, aux, _ = read_alone(target, [*prompt, last, *tree.path(node)])
        torch.testing.assert_close(read.logits[node + 1], logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(read.aux[node + 1], aux, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_the_accepted_path_is_all_that_stays_in_the_cache(seed: int) -> None:
    target = Target(tiny_target(seed), LISTENS)
    rng = random.Random(seed)
    text = tiny_prompt(seed)
    cache = KVCache()
    target.prefill(text, cache)
    for cycle in range(6):
        tree = random_tree(10 * seed + cycle) if cycle % 2 else chain([rng.randrange(12)] * 5)
        committed, last = cache.length, rng.randrange(12)
        target.verify(last, tree, cache)
        node = rng.randrange(ROOT, len(tree))
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = tree.parents[node]
        cache.keep(committed, torch.tensor([0, *(n + 1 for n in reversed(path))]))
        text += [last, *(tree.tokens[n] for n in reversed(path))]
        assert_same_cache(cache, read_alone(target, text)[2])


@torch.inference_mode()
def test_the_cache_outgrows_what_was_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoder.engines.reference.kv_cache.SPARE", 3)
    target = Target(tiny_target(0), LISTENS)
    text, cache = tiny_prompt(0), KVCache()
    target.prefill(text, cache)
    for token in range(12):
        target.verify(token, chain([]), cache)
        text.append(token)
    assert_same_cache(cache, read_alone(target, text)[2])
    cache.keep(5)
    assert_same_cache(cache, read_alone(target, text[:5])[2])


def test_a_listener_hears_the_inputs_of_its_layers() -> None:
    model: Any = tiny_target(0)
    text = tiny_prompt(0)
    heard = Target(model, LISTENS).listen(text)
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(heard, torch.cat([states[i][0] for i in LISTENS], -1))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Sequential(nn.Linear(96, 40, bias=False)))


def test_a_packed_model_computes_what_it_did_and_each_row_alone() -> None:
    model = layers()
    x = torch.randn(2, 7, 48)
    with torch.inference_mode():
        before = model(x)
        pack(model)
        after = model(x)
        alone = torch.cat([model(row[None]) for row in x.flatten(0, 1)])
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == 2
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(after.flatten(0, 1), alone, rtol=1e-6, atol=1e-6)
    half = layers().to(torch.bfloat16)
    pack(half)  # which cannot be packed
    assert not any(isinstance(m, PackedLinear) for m in half.modules())
