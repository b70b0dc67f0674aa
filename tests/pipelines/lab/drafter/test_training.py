"""Drafters: conversations keep the target's states, copying is learned, runs resume."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from pipelines import embedded
from pipelines.cli import app
from pipelines.lab.drafter import compose
from pipelines.lab.drafter import train as training
from pipelines.lab.drafter.compose import write
from pipelines.lab.drafter.head import Eagle3Head, HeadConfig, load_head
from pipelines.lab.drafter.train import Run, Settings, Target, evaluate, export, train
from pipelines.lab.drafter.unroll import (
    Conversation,
    Pack,
    copying_loss,
    learn_to_copy,
    read_shards,
    unroll,
    write_shard,
)

STATES, END = (0, 1, 3), 2


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """A random Llama with tied embeddings."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3)).eval()


@torch.no_grad()
def expected(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """(tokens, layers + 1, hidden) by one pass over a whole text alone."""
    found = model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return torch.stack([*(found.hidden_states[i][0] for i in STATES), found[0][0]], 1)


def test_every_conversation_keeps_the_states_of_its_own_tokens(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of all lengths share passes, are read in pieces and end one after the other."""
    monkeypatch.setattr(compose, "PROMPT_TOKENS", 5)
    torch.manual_seed(1)
    prompts = [torch.randint(64, (1 + 2 * i,)).tolist() for i in range(12)]
    temperatures = 0.7 * (torch.arange(12) % 2)
    done = list(write(llama, prompts, temperatures, END, 30, STATES))
    assert sorted(place for place, _, _ in done) == list(range(12))
    assert len({len(text) - len(prompts[place]) for place, text, _ in done}) > 2
    for place, text, states in done:
        answer = text[len(prompts[place]) :]
        assert text[: len(prompts[place])] == prompts[place]
        assert END not in answer[:-1] and (answer[-1] == END or len(answer) == 30)
        wanted = expected(llama, text[:-1])
        torch.testing.assert_close(states, wanted.bfloat16(), rtol=0.01, atol=0.01)
        if not temperatures[place]:
            likeliest = llama.lm_head(wanted[:, -1]).argmax(-1)
            assert likeliest[-len(answer) :].tolist() == answer


VOCABULARY, HIDDEN, DRAFT = 40, 32, 24
LAYERS = (1, 2, 3)
SHAPE = HeadConfig(HIDDEN, 48, 4, 2, 16, VOCABULARY, DRAFT, 10_000.0, 1e-6, 128, LAYERS)
SETTINGS = Settings(LAYERS, DRAFT, 1.25, 60, learning_rate=3e-3, heldout_every=4, heldout_at_most=4)


def tiny_head(seed: int = 0) -> Eagle3Head:
    """A head with random weights, two groups of two query heads."""
    torch.manual_seed(seed)
    head = Eagle3Head(SHAPE)
    head.set_vocabulary(torch.randperm(VOCABULARY)[:DRAFT].sort().values)
    return head


@pytest.fixture
def target() -> Target:
    """Random embeddings of a model that does not exist; nothing here runs it."""
    torch.manual_seed(5)
    config = SimpleNamespace(**vars(SHAPE), rope_parameters={"rope_theta": SHAPE.rope_theta})
    return Target(torch.randn(VOCABULARY, HIDDEN), torch.ones(HIDDEN), config)


def conversation(tokens: list[int], target: Target, prompt: int = 4) -> Conversation:
    """States that a perfect target would have: each layer knows the token, the last the next."""
    ids = torch.tensor(tokens)
    here = target.embedding[ids]
    aux = torch.cat((here, here.roll(1, 0), torch.randn_like(here)), 1)
    final = 4 * target.embedding[ids.roll(-1)]
    return Conversation(ids, prompt, True, aux.bfloat16(), final.bfloat16())


def conversations(count: int, target: Target, length: int = 24) -> list[Conversation]:
    torch.manual_seed(9)
    return [
        conversation(torch.randint(VOCABULARY, (length,)).tolist(), target) for _ in range(count)
    ]


def repeating(count: int, target: Target) -> list[Conversation]:
    """Twelve random tokens, and the same again: the second half can be copied."""
    torch.manual_seed(11)
    halves = [torch.randperm(VOCABULARY)[:12].tolist() for _ in range(count)]
    return [conversation(half * 2, target) for half in halves]


def packed(some: list[Conversation], target: Target) -> Pack:
    return Pack.of(some, target.embedding, torch.ones(1))


def test_learning_to_copy_raises_what_can_be_copied(target: Target) -> None:
    head, some = tiny_head(), repeating(240, target)
    packs = [packed(some[:160], target)]
    packs += [packed(some[i : i + 20], target) for i in range(0, 200, 20)]
    batch = packed(some[200:], target)

    def copied() -> float:
        """Share of copyable tokens in the draft vocabulary that step 0 ranks among five best."""
        rows = torch.cat([torch.arange(b + 12, e - 2) for b, e in batch.spans])
        rows = rows[head.t2d[batch.tokens[rows + 2]]]
        with torch.no_grad():
            ((_, _, logits),) = unroll(head, batch, rows, 1)
        best = head.target_ids[logits.topk(5).indices]
        return float((best == batch.tokens[rows + 2, None]).any(-1).float().mean())

    before = copied()
    learn_to_copy(head, iter(packs[:1]), strength=2.0)
    started = copying_loss(head, batch).item()
    head = tiny_head()
    learn_to_copy(head, iter(packs), strength=2.0)
    assert copying_loss(head, batch).item() < started
    assert copied() > 2 * before


def test_training_lowers_the_loss_and_resumes_where_it_stopped(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, losses = replace(SETTINGS, dtype="bfloat16"), list[float]()
    # a clock that ticks once a look makes the run's length a number of batches
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("pipelines.lab.drafter.train.time", clock)
    checkpoint, whole = tmp_path / "head.pt", repeating(96, target)

    def step(what: str, *_: float) -> None:
        losses.append(float(what.partition("loss ")[2].partition(")")[0]))

    run = train(target, whole, checkpoint, settings, step, lambda *_: None)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    again = Run.resume(checkpoint, target, settings)
    assert (again.batch, again.rows, again.best) == (run.batch, run.rows, run.best)
    torch.testing.assert_close(again.head.state_dict(), run.head.state_dict(), rtol=0, atol=0)
    held, kept = again.optimizer.state_dict(), run.optimizer.state_dict()
    assert held["param_groups"] == kept["param_groups"]
    torch.testing.assert_close(held["state"], kept["state"], rtol=0, atol=0)
    half = replace(settings, minutes=settings.minutes / 2)
    last = train(target, whole, checkpoint, half, step, lambda *_: None)
    assert run.batch < last.batch < 2 * run.batch


def test_an_exported_head_takes_unscaled_states_and_its_card_says_what_it_saw(
    tmp_path: Path, target: Target
) -> None:
    write_shard(tmp_path, 0, conversations(20, target))
    write_shard(tmp_path, 1, conversations(12, target))
    there = read_shards(tmp_path)
    c = there[20]
    torch.testing.assert_close(c._asdict(), conversations(1, target)[0]._asdict(), rtol=0, atol=0)
    run = Run.start(target, SETTINGS, there)
    found = evaluate(run.head, [c], target.embedding, run.scale)
    export(run, tmp_path / "head", SETTINGS, there, found)
    head = load_head(tmp_path / "head", hidden_size=HIDDEN, vocab_size=VOCABULARY)
    scaled = run.head.fc(c.aux.float() / run.scale)
    torch.testing.assert_close(head.fc(c.aux.float()), scaled, rtol=0.05, atol=0.05)
    card = (tmp_path / "head" / "README.md").read_text()
    assert "32 conversations, 768 tokens, 640 of them in answers" in card and "rows=60" in card


DEEP, WORDS = 29, 49_152


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Llama as deep as the embedded model, with its tokenizer; short conversations."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": DEEP}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))
    path = tmp_path / "target"
    model.save_pretrained(path)
    for pattern in ("*token*", "*template*"):
        for file in embedded.ensure_model().glob(pattern):
            shutil.copy(file, path)
    monkeypatch.setattr(embedded, "ensure_model", lambda: path)
    monkeypatch.setattr(compose, "AT_ONCE", 8)
    monkeypatch.setattr(compose, "LONGEST_ANSWER", 40)
    monkeypatch.setattr(compose, "INSTRUCTION", 8)
    monkeypatch.setattr(training, "COPY_SIZES", (6, 2))
    return path


def test_a_head_comes_of_it_and_every_step_goes_on_where_it_was_stopped(
    tmp_path: Path, deep: Path
) -> None:
    folder, head = tmp_path / "work", tmp_path / "head"

    def hvd(*arguments: str) -> str:
        asked = ["train-drafter", "--folder", str(folder), "--out", str(head), "--tokens", "1000"]
        return CliRunner().invoke(app, [*asked, *arguments], catch_exceptions=False).output

    def shards() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (folder / "states").iterdir()}

    def stop(_: str, done: float, __: float) -> None:
        if done > 400:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compose.compose(deep, folder / "states", 1000, torch.float32, stop)
    first = shards()
    assert first and all(name.endswith(".pt") for name in first)
    said = hvd("--minutes", "0.02")
    whole = shards()
    assert first.items() < whole.items()
    written = read_shards(folder / "states")
    assert sum(c.answer for c in written) >= 1000
    prompts = {tuple(c.tokens[: c.prompt].tolist()) for c in written}
    assert len(prompts) > 0.9 * len(written), "it does not begin again"

    assert "accepted a cycle" in said
    hvd("--minutes", "0.02")
    assert shards() == whole, "nothing is written twice"
    load_head(head, hidden_size=16, vocab_size=WORDS, layers=DEEP)
    assert f"{len(written)} conversations" in (head / "README.md").read_text()
