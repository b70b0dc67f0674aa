"""Verification: as if the text had been read from nothing, and nothing rejected remains."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from decoder.engines.reference.target import Target
from pipelines.lab.kv_cache import KVCache
from pipelines.lab.packed import PackedLinear, pack_layers
from tests.engines.tiny import Family, tiny_prompt, tiny_target

AUX = (1, 2, 4)


def read_alone(target: Target, text: list[int], cache: Any) -> tuple[Tensor, Tensor]:
    """Logits and drafter's inputs of a text read from nothing, which fills ``cache``."""
    read = target.run(text, cache, last=True)
    assert read.aux is not None
    return read.logits[-1], read.aux[-1]


def assert_same_cache(cache: Any, other: Any) -> None:
    n = cache.get_seq_length()
    assert n == other.get_seq_length()
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.keys[..., :n, :], theirs.keys[..., :n, :])
        torch.testing.assert_close(mine.values[..., :n, :], theirs.values[..., :n, :])


@pytest.mark.parametrize("new_cache", [DynamicCache, KVCache])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("seed", range(2))
@torch.inference_mode()
def test_verification_equals_a_fresh_prefill_and_keeps_accepted_tokens_only(
    family: Family, seed: int, new_cache: Callable[[], Any]
) -> None:
    target = Target(tiny_target(seed, family), AUX)
    rng = random.Random(seed)
    text = tiny_prompt(seed)
    cache = new_cache()
    target.run(text, cache)
    for _ in range(4):
        last, draft = rng.randrange(12), [rng.randrange(12) for _ in range(5)]
        read = target.run([last, *draft], cache)
        assert read.aux is not None and read.logits.shape[0] == 1 + len(draft)
        for n in range(1 + len(draft)):
            logits, aux = read_alone(target, [*text, last, *draft[:n]], new_cache())
            torch.testing.assert_close(read.logits[n], logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(read.aux[n], aux, rtol=1e-4, atol=1e-4)
        accepted = rng.randrange(6)
        cache.crop(accepted - len(draft))
        text += [last, *draft[:accepted]]
        read_alone(target, text, alone := new_cache())
        assert_same_cache(cache, alone)


@torch.inference_mode()
def test_the_kv_cache_grows_beyond_its_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.lab.kv_cache.SPARE", 3)
    target = Target(tiny_target(0), AUX)
    text, cache = tiny_prompt(0), KVCache()
    target.run(text, cache)
    for token in range(12):
        target.run([token], cache)
        text.append(token)
    for kept in (len(text), 5):
        cache.crop(kept - cache.get_seq_length())
        read_alone(target, text[:kept], alone := KVCache())
        assert_same_cache(cache, alone)


def test_recorded_states_are_the_inputs_of_their_layers() -> None:
    model: Any = tiny_target(0)
    text = tiny_prompt(0)
    read = Target(model, AUX).run(text)
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(read.aux, torch.cat([states[i][0] for i in AUX], -1))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Sequential(nn.Linear(96, 40, bias=False)))


def test_a_packed_model_computes_the_same_row_by_row() -> None:
    model = layers()
    x = torch.randn(2, 7, 48)
    with torch.inference_mode():
        before = model(x)
        pack_layers(model)
        after = model(x)
        alone = torch.cat([model(row[None]) for row in x.flatten(0, 1)])
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == 2
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(after.flatten(0, 1), alone, rtol=1e-6, atol=1e-6)
    half = layers().to(torch.bfloat16)
    pack_layers(half)  # which cannot be packed
    assert not any(isinstance(m, PackedLinear) for m in half.modules())
