"""The EAGLE3 head against a naive recomputation, its file layout, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipelines.lab.drafter.head import Eagle3Head, load_head
from pipelines.lab.drafter.save import save_head
from pipelines.lab.drafter.unroll import Pack, unroll
from tests.pipelines.lab.drafter.shape import CONFIG


@pytest.fixture
def head() -> Eagle3Head:
    torch.manual_seed(7)
    head = Eagle3Head(CONFIG)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    head.set_vocabulary(torch.randperm(50)[:20].sort().values)
    return head.eval()


@pytest.fixture
def embedding() -> nn.Embedding:
    torch.manual_seed(8)
    return nn.Embedding(50, 24)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + CONFIG.rms_norm_eps).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * CONFIG.rope_theta ** (-2 * i / len(x)))
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def naive(
    w: dict[str, Tensor], embeds: list[Tensor], hidden: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits and next hidden state at the last position: one token, one head at a time."""
    a = "midlayer.self_attn."
    d, group = CONFIG.head_dim, CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    keys, values = [], []
    for p, (e, h) in enumerate(zip(embeds, hidden, strict=True)):
        normed_e = rms(e, w["midlayer.input_layernorm.weight"])
        x = torch.cat((normed_e, rms(h, w["midlayer.hidden_norm.weight"])))
        keys.append([rotate(k, p) for k in (w[a + "k_proj.weight"] @ x).split(d)])
        values.append((w[a + "v_proj.weight"] @ x).split(d))
    queries = [rotate(q, len(hidden) - 1) for q in (w[a + "q_proj.weight"] @ x).split(d)]
    attended = []
    for i, q in enumerate(queries):
        scores = torch.stack([q @ k[i // group] / d**0.5 for k in keys]).softmax(0)
        attended.append(sum(s * v[i // group] for s, v in zip(scores, values, strict=True)))
    out = hidden[-1] + w[a + "o_proj.weight"] @ torch.cat(attended)
    x = rms(out, w["midlayer.post_attention_layernorm.weight"])
    gate = w["midlayer.mlp.gate_proj.weight"] @ x
    out = out + w["midlayer.mlp.down_proj.weight"] @ (
        gate * gate.sigmoid() * (w["midlayer.mlp.up_proj.weight"] @ x)
    )
    return w["lm_head.weight"] @ rms(out, w["norm.weight"]), out


def naive_draft(
    head: Eagle3Head, embedding: nn.Embedding, tokens: Tensor, aux: Tensor, k: int
) -> list[int]:
    w = head.state_dict()
    embeds = list(embedding.weight[tokens])
    hidden = [w["fc.weight"] @ a for a in aux]
    drafted = []
    for _ in range(k):
        logits, out = naive(w, embeds, hidden)
        best = int(logits.argmax())
        drafted.append(best + int(w["d2t"][best]))
        embeds.append(embedding.weight[drafted[-1]])
        hidden.append(out)
    return drafted


@torch.inference_mode()
def test_drafting_with_a_cache_equals_naive_recomputation(
    head: Eagle3Head, embedding: nn.Embedding
) -> None:
    tokens, aux = torch.randint(50, (9,)), torch.randn(9, 72)
    past = None
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        hidden, past = head.extend(embedding, tokens[begin:end], aux[begin:end], past)
        assert head.chain(embedding, hidden, past, 4) == naive_draft(
            head, embedding, tokens[:end], aux[:end], 4
        )


@torch.inference_mode()
def test_training_unrolls_what_serving_drafts(head: Eagle3Head, embedding: nn.Embedding) -> None:
    spans = ((0, 7), (7, 12))
    tokens, aux = torch.randint(50, (12,)), torch.randn(12, 72)
    pack = Pack(tokens, embedding(tokens), aux, torch.randn(12, 24), spans)
    rows = torch.tensor([0, 2, 3, 5, 7, 10])
    seen = 0
    for j, step in enumerate(unroll(head, pack, rows, 3)):
        for row, label, logits in zip(*step, strict=True):
            begin = 0 if row < 7 else 7
            embeds = list(embedding(tokens[begin + 1 : row + 2 + j]))
            hidden = list(head.fc(aux[begin : row + 1]))
            for i in range(j + 1):
                expected, out = naive(head.state_dict(), embeds[: len(embeds) - j + i], hidden)
                hidden.append(out)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert label == row + 1 + j
            seen += 1
    assert seen == 6 + 4 + 4


def test_file_layout_is_the_public_one(head: Eagle3Head, tmp_path: Path) -> None:
    save_head(head, tmp_path, torch.float32)
    layer = "midlayer."
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == {
            "fc.weight",
            layer + "input_layernorm.weight",
            layer + "hidden_norm.weight",
            layer + "post_attention_layernorm.weight",
            *(layer + f"self_attn.{n}_proj.weight" for n in "qkvo"),
            *(layer + f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
            "norm.weight",
            "lm_head.weight",
            "d2t",
            "t2d",
        }
        assert stored.get_tensor("d2t").dtype == torch.int64
        assert stored.get_tensor("t2d").dtype == torch.bool
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    loaded = load_head(tmp_path, hidden_size=24, vocab_size=50)
    assert loaded.config == CONFIG
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert torch.equal(loaded.t2d.nonzero()[:, 0], loaded.target_ids)


@torch.inference_mode()
def test_half_precision_rotates_far_positions_as_precisely(head: Eagle3Head) -> None:
    """Positions are multiplied with frequencies before anything is rounded to half precision."""
    x, positions = torch.randn(3, 48), torch.tensor([2, 900, 7_001])
    precise = head.midlayer.self_attn.queries(x, positions)
    half = head.to(torch.bfloat16).midlayer.self_attn.queries(x.bfloat16(), positions)
    torch.testing.assert_close(half.float(), precise, rtol=0.05, atol=0.1)
