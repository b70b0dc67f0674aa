"""Conversations with the target's states: what is kept is what the target computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipelines.drafter import compose
from pipelines.drafter.asks import LONGEST_DOCUMENT, LONGEST_INSTRUCTION, Ask, asks
from pipelines.drafter.compose import Writer, write
from pipelines.drafter.lockstep import Llama, Slots

LAYERS = (1, 2, 4)
END, BRIDGE = 2, [5, 6, 7]
EXACT, BF16 = 1e-4, 0.02
"""Tolerances."""

Model = tuple[LlamaForCausalLM, Path]


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random Llama with tied embeddings, as a model and as a checkpoint."""
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
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    return model, path


def expected(model: LlamaForCausalLM, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, layers, hidden) and (tokens, hidden) by transformers."""
    entered = dict[int, torch.Tensor]()

    def keep(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            entered[layer] = args[0][0]

        return hook

    # the final norm's input is the stream that leaves the last layer
    stages = [*model.model.layers, model.model.norm]
    hooks = [stages[layer].register_forward_pre_hook(keep(layer)) for layer in LAYERS]
    with torch.no_grad():
        final = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return torch.stack([entered[layer] for layer in LAYERS], 1), final


def test_reading_a_prompt_gives_the_states_of_transformers(target: Model) -> None:
    model, path = target
    tokens = torch.randint(64, (20,)).tolist()
    aux, final = expected(model, tokens)
    read = Slots(Llama.load(path), 1, 32, LAYERS).read(0, tokens)
    assert_close(read.final, final, EXACT)
    assert_close(read.aux.float(), aux, BF16)


def test_products_in_bfloat16_give_nearly_the_same_states(target: Model) -> None:
    model, path = target
    tokens = torch.randint(64, (20,)).tolist()
    slots = Slots(Llama.load(path, torch.bfloat16), 1, 32, LAYERS)
    aux, final = expected(model, tokens)
    read = slots.read(0, tokens[:-1])
    step = slots.step(torch.arange(1), torch.tensor(tokens[-1:]), torch.tensor([19]))
    assert read.final.dtype == torch.float32
    for found, wanted in ((torch.cat((read.final, step.final)), final), (read.aux, aux[:-1])):
        off = (found - wanted).norm() / wanted.norm()
        assert off < 0.03, "eight bits of mantissa, four layers"


def test_steps_of_slots_with_different_lengths_go_on_where_the_prompts_ended(target: Model) -> None:
    model, path = target
    first, second = torch.randint(64, (18,)).tolist(), torch.randint(64, (9,)).tolist()
    slots = Slots(Llama.load(path), 2, 32, LAYERS)
    slots.read(0, first[:-1])
    slots.read(1, second[:-1])
    last = torch.tensor([first[-1], second[-1]])
    step = slots.step(torch.arange(2), last, torch.tensor([17, 8]))
    assert_close(step.final[0], expected(model, first)[1][-1], EXACT)
    assert_close(step.final[1], expected(model, second)[1][-1], EXACT)


def test_a_moved_conversation_goes_on_in_its_new_slot(target: Model) -> None:
    model, path = target
    tokens = torch.randint(64, (12,)).tolist()
    slots = Slots(Llama.load(path), 2, 32, LAYERS)
    slots.read(0, [1] * 20)
    slots.read(1, tokens[:-1])
    slots.move(1, 0)
    step = slots.step(torch.arange(1), torch.tensor(tokens[-1:]), torch.tensor([11]))
    assert_close(step.final[0], expected(model, tokens)[1][-1], EXACT)


def test_every_conversation_keeps_the_states_of_its_own_tokens(
    target: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More conversations than slots, of all kinds and lengths, so that slots are handed on."""
    model, path = target
    monkeypatch.setattr(compose, "LENGTH", 160)
    monkeypatch.setattr(compose, "LONGEST_ANSWER", 30)
    torch.manual_seed(1)
    writers = [
        Writer.of(
            Ask(
                torch.randint(64, (4 + 2 * i,)).tolist(),
                10 if i % 3 == 0 else 0,
                (8, 9) if i == 3 else (),
                ((END, 3, *BRIDGE),) if i % 4 == 1 else (),
            ),
            0.7 * (i % 2),
        )
        for i in range(8)
    ]
    done = list(write(Llama.load(path), iter(writers), END, BRIDGE, LAYERS, at_once=3))
    assert len(done) > 3
    for tokens, prompt, greedy, aux, final in done:
        wanted_aux, wanted_final = expected(model, tokens)
        assert_close(aux.float(), wanted_aux, BF16)
        assert_close(final.float(), wanted_final, BF16)
        if greedy:
            likeliest = (wanted_final @ model.lm_head.weight.detach().T).argmax(-1)
            assert likeliest[prompt - 1 : -1].tolist() == tokens[prompt:]


def test_an_instruction_that_ends_is_followed_by_the_opening_of_the_answer() -> None:
    writer = Writer.of(Ask([1, 2], 80), 0.0)
    for sampled in (9, END, 0, 0, 11):
        assert writer.take(sampled, END, BRIDGE)
    assert writer.tokens == [1, 2, 9, *BRIDGE, 11]
    assert writer.prompt == 6
    assert not writer.take(END, END, BRIDGE)


def test_a_document_ends_with_a_question_about_it() -> None:
    writer = Writer.of(Ask([1, 2], 3, (20, 21)), 0.0)
    for sampled in (9, 10, 11, 0, 0, 0, 0, 12):
        assert writer.take(sampled, END, BRIDGE)
    assert writer.tokens == [1, 2, 9, 10, 20, 21, *BRIDGE, 12]
    assert writer.prompt == 9


@pytest.mark.parametrize("stopped", [True, False], ids=["ended", "cut off"])
def test_a_conversation_goes_on_behind_its_answer(
    stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "LONGEST_ANSWER", 3)
    writer = Writer.of(Ask([1], follow_ups=((END, 30, *BRIDGE),)), 0.0)
    answer = [10, END] if stopped else [10, 11, 12]
    for sampled in (*answer, *[0] * (4 if stopped else 5)):
        assert writer.take(sampled, END, BRIDGE)
    assert writer.tokens == [1, 10, *([] if stopped else [11, 12]), END, 30, *BRIDGE]
    assert writer.prompt == len(writer.tokens)
    assert not writer.take(END, END, BRIDGE)


def test_where_the_last_answer_is_a_word_the_one_before_is_kept() -> None:
    writer = Writer.of(Ask([1], follow_ups=((END, 30, *BRIDGE),)), 0.0)
    for sampled in (10, 11, 12, 13, 14, END, 0, 0, 0, 0, 40):
        assert writer.take(sampled, END, BRIDGE)
    assert not writer.take(END, END, BRIDGE)
    assert writer.whole == (1, 7)
    assert writer.tokens[1:7] == [10, 11, 12, 13, 14, END]
    assert Writer.of(Ask([1]), 0.0).whole is None


def test_instructions_are_sampled_warm_and_answers_as_asked() -> None:
    writer = Writer.of(Ask([1], 80), 0.0)
    assert writer.temperature == 1.0
    for sampled in (END, 0, 0):
        writer.take(sampled, END, BRIDGE)
    assert writer.temperature == 0.0


def test_an_answer_that_repeats_itself_ends_before_one_that_does_not() -> None:
    def length(answer: Iterable[int]) -> int:
        writer = Writer.of(Ask([1, 3]), 0.0)
        return next(n for n, t in enumerate(answer) if not writer.take(t, END, BRIDGE))

    assert length(itertools.cycle(range(10, 15))) < length(itertools.count(10))
    assert length(itertools.count(10)) == compose.LONGEST_ANSWER - 1


def test_an_answer_that_may_repeats_itself_to_its_limit_as_in_service() -> None:
    writer = Writer.of(Ask([1, 3]), 0.0)
    writer.may_loop = True
    repeated = itertools.cycle(range(10, 15))
    taken = next(n for n, t in enumerate(repeated) if not writer.take(t, END, BRIDGE))
    assert taken == compose.LONGEST_ANSWER - 1
    assert writer.temperature == 0.0


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
    first, again, other = (list(itertools.islice(asks(Letters(), seed), 200)) for seed in (1, 1, 2))
    assert first == again != other
    assert {a.longest for a in first} == {0, LONGEST_INSTRUCTION, LONGEST_DOCUMENT}
    assert {len(a.follow_ups) for a in first} == {0, 1, 2}
    for ask in first:
        text = "".join(map(chr, ask.tokens))
        assert text.endswith("<assistant>") != bool(ask.longest)
