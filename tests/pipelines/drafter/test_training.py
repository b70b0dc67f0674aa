"""Training: chains see what serving would, copying is learned, runs resume, scores are right."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from decoder.contracts.errors import ModelError
from decoder.drafting.eagle3 import Eagle3Head, HeadConfig, load_head
from pipelines.drafter.acceptance import DRAFTED, Acceptance, evaluate
from pipelines.drafter.command import make_drafter, provenance
from pipelines.drafter.conversations import chain_rows, draft_vocabulary, pack
from pipelines.drafter.copying import (
    connect_copiers,
    copiers,
    copying_loss,
    learn_to_copy,
    start_copiers,
)
from pipelines.drafter.export import Provenance, export
from pipelines.drafter.run import Run, Settings, Target
from pipelines.drafter.shards import Sequence, Shards, write_shard
from pipelines.drafter.train import ROUND, _batches, loss, train
from pipelines.drafter.unroll import Pack, unroll

VOCABULARY, HIDDEN, DRAFT = 40, 32, 24
LAYERS = (1, 2, 3)
SETTINGS = Settings(
    aux_layers=LAYERS,
    draft_vocab_size=DRAFT,
    minutes=2.5,
    rows=60,
    learning_rate=3e-3,
    heldout_every=4,
    heldout_at_most=4,
)


def tiny_head(seed: int = 0) -> Eagle3Head:
    """A head with random weights, two groups of two query heads."""
    torch.manual_seed(seed)
    head = Eagle3Head(
        HeadConfig(
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=VOCABULARY,
            draft_vocab_size=DRAFT,
            rope_theta=10_000.0,
            rms_norm_eps=1e-6,
            max_position_embeddings=128,
            aux_layers=LAYERS,
        )
    )
    head.set_vocabulary(torch.randperm(VOCABULARY)[:DRAFT].sort().values)
    return head


@pytest.fixture
def target() -> Target:
    """Random embeddings of a model that does not exist; nothing here runs it."""
    torch.manual_seed(5)
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        rope_parameters={"rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
    )
    return Target(torch.randn(VOCABULARY, HIDDEN), torch.ones(HIDDEN), config)


def conversation(tokens: list[int], target: Target, prompt: int = 4) -> Sequence:
    """States that a perfect target would have: each layer knows the token, the last the next."""
    ids = torch.tensor(tokens)
    here = target.embedding[ids]
    aux = torch.cat((here, here.roll(1, 0), torch.randn_like(here)), 1)
    final = 4 * target.embedding[ids.roll(-1)]
    return Sequence(ids, prompt, True, aux.bfloat16(), final.bfloat16())


def conversations(count: int, target: Target, length: int = 24) -> list[Sequence]:
    torch.manual_seed(9)
    return [
        conversation(torch.randint(VOCABULARY, (length,)).tolist(), target) for _ in range(count)
    ]


def repeating(count: int, target: Target) -> list[Sequence]:
    """Twelve random tokens, and the same again: the second half can be copied."""
    torch.manual_seed(11)
    halves = [torch.randperm(VOCABULARY)[:12].tolist() for _ in range(count)]
    return [conversation(half * 2, target) for half in halves]


def serial(head: Eagle3Head, s: Sequence, at: int, steps: int, target: Target) -> list[Tensor]:
    """Logits of a chain from row ``at`` by the head's own cache, the true tokens beside it."""
    embeds = target.embedding[s.tokens]
    committed = torch.arange(at + 1)
    logits, hidden, cache = head(embeds[1 : at + 2], head.fc(s.aux[: at + 1].float()), committed)
    out = [logits[-1]]
    for j in range(1, steps):
        place = torch.tensor([at + j])
        logits, hidden, cache = head(embeds[at + 1 + j][None], hidden[-1:], place, cache)
        out.append(logits[-1])
    return out


@torch.no_grad()
def test_unrolled_chains_compute_what_serial_drafting_does(target: Target) -> None:
    head, two = tiny_head(), conversations(2, target)
    rows = torch.tensor([3, 7, 24 + 5])
    steps = list(unroll(head, pack(two, target.embedding, torch.ones(1)), rows, 3))
    for n, (s, at) in enumerate(((two[0], 3), (two[0], 7), (two[1], 5))):
        for step, wanted in zip(steps, serial(head, s, at, 3, target), strict=True):
            torch.testing.assert_close(step.logits[n], wanted, rtol=1e-4, atol=1e-4)
            assert int(step.rows[n]) == int(rows[n])


def test_chains_start_at_every_answer_position_but_never_at_the_first_or_last(
    target: Target,
) -> None:
    two = conversations(2, target)
    assert chain_rows(two, 0.0).tolist() == [*range(3, 23), *range(27, 47)]
    assert chain_rows(two, 1.0).tolist() == [*range(1, 23), *range(25, 47)]


def test_the_draft_vocabulary_prefers_what_answers_hold(target: Target) -> None:
    s = conversation([3, 3, 3, 3, 7, 7, 7, 30, 30, 31], target)
    unsure = replace(s, final=torch.zeros_like(s.final))
    assert draft_vocabulary([unsure], 3, target.embedding).tolist() == [7, 30, 31]
    assert draft_vocabulary([unsure], 6, target.embedding).tolist() == [0, 1, 3, 7, 30, 31]


def test_the_draft_vocabulary_counts_what_the_target_expected(target: Target) -> None:
    s = conversation([3, 3, 3, 3, 7, 7, 7, 30], target)
    expecting = replace(s, final=(4 * target.embedding[9]).expand(8, -1).bfloat16())
    assert 9 in draft_vocabulary([expecting], 2, target.embedding).tolist()


@torch.no_grad()
def test_acceptance_counts_cycles_as_decoding_would(target: Target) -> None:
    head, s = tiny_head(3), conversations(1, target, 40)[0]
    ids, at, cycles, accepted = head.target_ids, s.prompt - 1, 0, 0
    while at + 2 < len(s.tokens):
        known = len(s.tokens) - at - 2
        drafts = [ids[x.argmax()] for x in serial(head, s, at, min(DRAFTED, known), target)]
        right = [bool(d == t) for d, t in zip(drafts, s.tokens[at + 2 :], strict=False)]
        length = next((n for n, r in enumerate(right) if not r), len(right))
        cycles, accepted, at = cycles + 1, accepted + length, at + length + 1
    found = evaluate(head, [s], target.embedding, torch.ones(1))
    assert found.cycles == cycles
    assert found.accepted == pytest.approx(accepted / cycles)


def test_copiers_are_one_query_head_of_each_group() -> None:
    assert [c // 2 for c in copiers(tiny_head())] == [0, 1]


@torch.no_grad()
def attended(head: Eagle3Head, batch: Pack, chosen: list[int]) -> float:
    """Attention of ``chosen`` to the one place to copy from, over the second halves."""
    layer, c = head.midlayer, head.config
    mixed = layer.mixed(batch.embeds.roll(-1, 0), head.fc(batch.aux))
    queries = layer.self_attn.queries(mixed, batch.positions)[chosen] * c.head_dim**-0.5
    keys = layer.self_attn.keys_values(mixed, batch.positions).keys
    shares = [
        (queries[:, p] @ keys[:, begin : p + 1].transpose(1, 2))
        .diagonal()
        .T.softmax(-1)[:, p - 11 - begin]
        for begin, end in batch.spans
        for p in range(begin + 12, end - 2)
    ]
    return float(torch.stack(shares).mean())


def test_copiers_start_by_looking_at_the_last_occurrence(target: Target) -> None:
    head, batch = tiny_head(), pack(repeating(60, target), target.embedding, torch.ones(1))
    chosen = copiers(head)
    before = attended(head, batch, chosen)
    start_copiers(head, batch, chosen)
    assert attended(head, batch, chosen) > 3 * before


def test_learning_to_copy_raises_what_can_be_copied(target: Target) -> None:
    head, sequences = tiny_head(), repeating(240, target)
    packs = [pack(sequences[:160], target.embedding, torch.ones(1))]
    packs += [
        pack(sequences[i : i + 20], target.embedding, torch.ones(1)) for i in range(0, 200, 20)
    ]
    batch, chosen = pack(sequences[200:], target.embedding, torch.ones(1)), copiers(head)

    def copied() -> float:
        """Share of copyable tokens in the draft vocabulary that step 0 ranks among five best."""
        rows = torch.cat([torch.arange(b + 12, e - 2) for b, e in batch.spans])
        rows = rows[head.t2d[batch.tokens[rows + 2]]]
        with torch.no_grad():
            (step,) = unroll(head, batch, rows, 1)
        best = head.target_ids[step.logits.topk(5).indices]
        return float((best == batch.tokens[rows + 2, None]).any(-1).float().mean())

    before = copied()
    learn_to_copy(head, packs[:1], chosen, strength=2.0)
    started = copying_loss(head, batch, chosen).item()
    head = tiny_head()
    learn_to_copy(head, packs, chosen, strength=2.0)
    assert copying_loss(head, batch, chosen).item() < started
    assert copied() > 2 * before


@torch.no_grad()
def test_connecting_copiers_leaves_the_other_heads_alone(target: Target) -> None:
    head = tiny_head()
    before = head.midlayer.self_attn.o_proj.weight.clone()
    connect_copiers(
        head, pack(conversations(30, target), target.embedding, torch.ones(1)), [1, 2], 1
    )
    changed = (before != head.midlayer.self_attn.o_proj.weight).any(0).unflatten(0, (4, -1)).all(1)
    assert changed.tolist() == [False, True, True, False]


def shards_of(folder: Path, sequences: list[Sequence], first: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    kept = [
        (s.tokens.tolist(), s.prompt, s.greedy, s.aux.unflatten(1, (3, -1)), s.final)
        for s in sequences
    ]
    for n, begin in enumerate(range(0, len(kept), 16)):
        write_shard(folder, first + n, kept[begin : begin + 16], LAYERS)
    return folder


def test_shards_read_back_what_was_written_and_split_it(tmp_path: Path, target: Target) -> None:
    written = conversations(32, target)
    shards = Shards(shards_of(tmp_path, written), LAYERS, heldout_every=4)
    shards.refresh()
    assert (len(shards.train), len(shards.heldout)) == (24, 8)
    assert torch.equal(shards.heldout[0].tokens, written[2].tokens)
    assert torch.equal(shards.heldout[0].aux, written[2].aux)


def untold(what: str, done: int, whole: int) -> None:
    """Nobody looks."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_lowers_the_loss_and_resumes_where_it_stopped(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    settings, computed = replace(SETTINGS, dtype=dtype), set[torch.dtype]()

    def noting(*given: Any) -> Tensor:
        with torch.no_grad():
            computed.add(given[0].lm_head(given[1].final[:1]).dtype)
        return loss(*given)

    monkeypatch.setattr("pipelines.drafter.train.loss", noting)
    # a clock that ticks once a look makes the run's length a number of batches
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("pipelines.drafter.train.time", clock)
    states, losses = shards_of(tmp_path / "states", repeating(96, target)), list[float]()
    checkpoint, exported = tmp_path / "head.safetensors", list[int]()

    def log(batch: int, metrics: dict[str, float]) -> None:
        losses.extend([metrics["loss"]] if "loss" in metrics else [])

    def improved(run: Run, found: Acceptance) -> None:
        exported.append(run.batch)

    run = train(target, states, checkpoint, settings, log, untold, improved)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert exported and max(exported) <= run.batch
    assert computed == {getattr(torch, dtype)}
    again = Run.resume(checkpoint, target, SETTINGS)
    assert (again.batch, again.rows, again.best) == (run.batch, run.rows, run.best)
    for name, weight in again.head.state_dict().items():
        assert torch.equal(weight, run.head.state_dict()[name])


def test_an_exported_head_takes_unscaled_states_and_its_card_says_what_it_saw(
    tmp_path: Path, target: Target
) -> None:
    states = shards_of(tmp_path / "states", conversations(16, target))
    shards_of(states, conversations(32, target), first=70000)
    shards = Shards(states, LAYERS, 4)
    shards.refresh()
    run = Run.start(target, SETTINGS, shards)
    s = shards.heldout[0]
    found = evaluate(run.head, [s], target.embedding, run.scale)
    made = provenance(states, run, (SETTINGS, replace(SETTINGS, seed=1)))
    assert made == Provenance({"composed": 16, "written": 32}, 48 * 24, 48 * 20, 0, 0, made.runs)
    export(run.exportable, tmp_path / "head", made, found)
    head = load_head(tmp_path / "head", hidden_size=HIDDEN, vocab_size=VOCABULARY)
    scaled = run.head.fc(s.aux.float() / run.scale)
    torch.testing.assert_close(head.fc(s.aux.float()), scaled, rtol=0.05, atol=0.05)
    card = (tmp_path / "head" / "README.md").read_text()
    assert "16 composed, 32 written" in card and "seed=1" in card


def test_training_without_states_says_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"states.*run hvd train-drafter --only compose"):
        make_drafter(tmp_path, tmp_path, tmp_path / "head", 1000, 1.0, "train", untold, Console())


def test_what_was_seen_less_comes_first(target: Target) -> None:
    sequences = conversations(600, target, 8)
    seen = Counter(dict.fromkeys(range(300), 40))
    list(_batches(sequences, seen, SETTINGS, random.Random(0)))
    drawn = [i for i in range(600) if seen[i] not in (0, 40)]
    assert len(drawn) == ROUND
    assert sum(i >= 300 for i in drawn) > 0.9 * ROUND
