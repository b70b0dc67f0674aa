"""Conversations with the target's states: what is kept is what the target computes."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipelines import embedded
from pipelines.lab.drafter import compose
from pipelines.lab.drafter.asks import asks
from pipelines.lab.drafter.compose import write

LAYERS, END = (0, 1, 3), 2


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """A random Llama with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def expected(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """(tokens, layers + 1, hidden) by one pass over a whole text alone."""
    found = model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return torch.stack([*(found.hidden_states[i][0] for i in LAYERS), found[0][0]], 1)


def test_every_conversation_keeps_the_states_of_its_own_tokens(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of all lengths share passes, are read in pieces and end one after the other."""
    monkeypatch.setattr(compose, "PROMPT_TOKENS", 5)
    torch.manual_seed(1)
    prompts = [torch.randint(64, (1 + 2 * i,)).tolist() for i in range(12)]
    temperatures = 0.7 * (torch.arange(12) % 2)
    done = list(write(target, prompts, temperatures, END, 30, LAYERS))
    assert sorted(place for place, _, _ in done) == list(range(12))
    assert len({len(text) - len(prompts[place]) for place, text, _ in done}) > 2
    for place, text, states in done:
        answer = text[len(prompts[place]) :]
        assert text[: len(prompts[place])] == prompts[place]
        assert END not in answer[:-1] and (answer[-1] == END or len(answer) == 30)
        wanted = expected(target, text[:-1])
        torch.testing.assert_close(states, wanted.bfloat16(), rtol=0.01, atol=0.01)
        if not temperatures[place]:
            likeliest = target.lm_head(wanted[:, -1]).argmax(-1)
            assert likeliest[-len(answer) :].tolist() == answer


def test_asks_repeat_with_their_seed_and_hold_open_and_whole_prompts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.ensure_model())
    first, again, other = (list(itertools.islice(asks(tokenizer, seed), 99)) for seed in (1, 1, 2))
    assert first == again != other
    assert {whole for _, whole in first} == {True, False}
    for ids, whole in first:
        text = tokenizer.decode(ids)
        assert text.startswith("<|im_start|>")
        assert text.endswith("<|im_start|>assistant\n") == whole
