"""Conversations with the target's states: what is kept is what the target computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipelines.drafter import compose
from pipelines.drafter.asks import INSTRUCTION, Ask, asks
from pipelines.drafter.compose import Writing, write

LAYERS = (1, 2, 4)
END, BRIDGE = 2, [5, 6, 7]


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
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def expected(model: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, layers * hidden) and (tokens, hidden) by one pass over a whole text alone."""
    entered = list[torch.Tensor]()

    def keep(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        entered.append(args[0][0])

    # the final norm's input is the stream that leaves the last layer
    stages = [*model.model.layers, model.model.norm]
    hooks = [stages[layer].register_forward_pre_hook(keep) for layer in LAYERS]
    final = model.model(tokens[None], use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return torch.cat(entered, 1), final


def test_every_conversation_keeps_the_states_of_its_own_tokens(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations of all kinds and lengths that share passes and end one after the other."""
    monkeypatch.setattr(compose, "LONGEST_ANSWER", 30)
    monkeypatch.setattr(compose, "PROMPT_TOKENS", 5)
    torch.manual_seed(1)
    some = [
        Writing(
            Ask(torch.randint(64, (4 + 2 * i,)).tolist(), 10 if i % 3 == 0 else 0),
            0.7 * (i % 2),
            END,
            BRIDGE,
        )
        for i in range(8)
    ]
    done = list(write(target, some, LAYERS))
    assert len(done) > 5
    for c in done:
        aux, final = expected(target, c.tokens)
        torch.testing.assert_close(c.aux, aux.bfloat16(), rtol=0.01, atol=0.01)
        torch.testing.assert_close(c.final, final.bfloat16(), rtol=0.01, atol=0.01)
        if c.greedy:
            likeliest = target.lm_head(final).argmax(-1)
            assert likeliest[c.prompt - 1 : -1].tolist() == c.tokens[c.prompt :].tolist()


def test_what_the_target_says_for_a_user_is_warm_and_followed_by_its_answer() -> None:
    writing = Writing(Ask([1], 80), 0.0, END, BRIDGE)
    assert writing.take(9) and writing.temperature == 1.0
    assert writing.take(END) and writing.temperature == 0.0
    assert (writing.tokens, writing.prompt) == ([1, 9, *BRIDGE], 5)
    assert writing.take(11) and not writing.take(END)
    cut_off = Writing(Ask([1], 2), 0.0, END, BRIDGE)
    assert cut_off.take(9) and cut_off.take(10)
    assert cut_off.tokens == [1, 9, 10, *BRIDGE]


class Letters:
    """A tokenizer of characters with a chat template as short as can be."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = True, **_: bool
    ) -> str | list[int]:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
        return [ord(c) for c in text] if tokenize else text

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text]}


def test_asks_repeat_with_their_seed_and_hold_open_and_whole_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelines.drafter.asks.LONGEST", 3000)
    first, again, other = (list(itertools.islice(asks(Letters(), seed), 300)) for seed in (1, 1, 2))
    assert first == again != other
    assert {a.longest for a in first} == {0, INSTRUCTION}
    for ask in first:
        text = "".join(map(chr, ask.tokens))
        assert text.endswith("<assistant>") != bool(ask.longest)
