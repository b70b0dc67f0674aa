"""Conversations with the target's states: what is kept is what the target computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipelines.drafter import compose
from pipelines.drafter.asks import LONGEST_DOCUMENT, LONGEST_INSTRUCTION, Ask, asks
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
    monkeypatch.setattr(compose, "LENGTH", 160)
    monkeypatch.setattr(compose, "LONGEST_ANSWER", 30)
    monkeypatch.setattr(compose, "PROMPT_TOKENS", 5)
    torch.manual_seed(1)
    some = [
        Writing(
            Ask(
                torch.randint(64, (4 + 2 * i,)).tolist(),
                10 if i % 3 == 0 else 0,
                (8, 9) if i == 3 else (),
                ((END, 3, *BRIDGE),) if i % 4 == 1 else (),
            ),
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


def said(ask: Ask, *sampled: int) -> Writing:
    """What becomes of ``ask`` where the target says ``sampled`` and then ends its turn."""
    writing = Writing(ask, 0.5, END, BRIDGE)
    assert [writing.take(token) for token in (*sampled, END)] == [True] * len(sampled) + [False]
    return writing


def test_what_the_target_says_for_a_user_is_followed_by_the_opening_of_its_answer() -> None:
    instruction = said(Ask([1], 80), 9, END, 11)
    assert instruction.tokens == [1, 9, *BRIDGE, 11, END]
    assert instruction.answers == [(5, 7)]
    document = said(Ask([1], 3, (20, 21)), 9, 10, 12)
    assert document.tokens == [1, 9, 10, 20, 21, *BRIDGE, 12, END]


def test_an_instruction_is_sampled_warm_and_its_answer_as_asked() -> None:
    writing = Writing(Ask([1], 80), 0.0, END, BRIDGE)
    assert writing.temperature == 1.0
    assert writing.take(END)
    assert writing.temperature == 0.0


def test_a_conversation_goes_on_behind_an_answer_that_ended_or_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compose, "LONGEST_ANSWER", 3)
    more = Ask([1], follow_ups=((END, 30, *BRIDGE),))
    assert said(more, 10, END).tokens == [1, 10, END, 30, *BRIDGE, END]
    assert said(more, 10, 11, 12, 13).tokens == [1, 10, 11, 12, END, 30, *BRIDGE, 13, END]


def test_where_the_last_answer_is_a_word_the_one_before_is_kept(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = iter([10, 11, 12, 13, 14, 15, END, 40, END])
    monkeypatch.setattr(compose, "_sample", lambda *_: [next(script)])
    asked = Ask([1], follow_ups=((END, 30, *BRIDGE),))
    (kept,) = write(target, [Writing(asked, 0.0, END, BRIDGE)], LAYERS)
    assert (kept.prompt, kept.tokens.tolist()) == (1, [1, 10, 11, 12, 13, 14, 15])


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
    assert {a.longest for a in first} == {0, LONGEST_INSTRUCTION, LONGEST_DOCUMENT}
    assert {len(a.follow_ups) for a in first} == {0, 1, 2}
    for ask in first:
        text = "".join(map(chr, ask.tokens))
        assert text.endswith("<assistant>") != bool(ask.longest)
