"""Heads in the layouts in which they are published, small and random, load as what they are.

The configurations are those of the three checkpoints of the paper's Table 5 with smaller sizes:
which keys are there, and which are not, is theirs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from decoder.contracts.errors import ModelError
from decoder.engines.reference.engine import ReferenceEngine
from pipelines.lab.drafter.head import Eagle3Head, HeadConfig, load_head
from pipelines.replay.rivals import method
from tests.engines.tiny import tiny_prompt, tiny_target

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 12,
    "num_key_value_heads": 2, "draft_vocab_size": 8, "num_hidden_layers": 1, "hidden_act": "silu",
    "model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
EAGLE = SIZES | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
"""yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: written for Llama's own configuration class."""
ANGELSLIM = SIZES | {
    "architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1_000_000, "sliding_window": None,
    "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
"""AngelSlim/Qwen3-4B_eagle3: heads together wider than the hidden state."""
SPECFORGE = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 8, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000, "rope_scaling": None,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
}  # fmt: skip
"""Tengyunw/qwen3_8b_eagle3, and what SpecForge writes."""


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Tensors as EAGLE names them."""
    torch.manual_seed(seed)
    h, heads = config["hidden_size"], config["num_attention_heads"]
    wide = config.get("head_dim", h // heads)
    kv, inner = config["num_key_value_heads"] * wide, config["intermediate_size"]
    shapes = {
        "fc.weight": (h, 3 * h),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (heads * wide, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, heads * wide),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "norm.weight": (h,),
        "lm_head.weight": (config["draft_vocab_size"], h),
    }
    made = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    drafted = torch.randperm(config["vocab_size"])[: config["draft_vocab_size"]].sort().values
    made["d2t"] = drafted - torch.arange(len(drafted))
    made["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
    made["t2d"][drafted] = True
    return made


def as_bin(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path / "pytorch_model.bin")


def as_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path / "model.safetensors")


def renamed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n.replace("midlayer.", prefix): t for n, t in tensors.items()}


def inside_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    plain = ("lm_head.weight", "d2t", "t2d")
    return {n if n in plain else f"model.{n}": t for n, t in tensors.items()}


def with_embeddings(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"embed_tokens.weight": torch.zeros(12, 32)}


LAYOUTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "eagle, pickled": (EAGLE, lambda t: t, as_bin),
    "eagle, safetensors": (EAGLE, lambda t: t, as_safetensors),
    "angelslim": (ANGELSLIM, lambda t: t, as_safetensors),
    "specforge": (SPECFORGE, lambda t: t, as_safetensors),
    "layers.0": (SPECFORGE, renamed("layers.0."), as_safetensors),
    "model.layers.0": (SPECFORGE, lambda t: inside_model(renamed("layers.0.")(t)), as_safetensors),
    "own embeddings": (EAGLE, with_embeddings, as_bin),
    "half precision": (ANGELSLIM, lambda t: {n: x.half() if x.is_floating_point() else x
                                             for n, x in t.items()}, as_safetensors),
}  # fmt: skip


def written(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], write: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    write(tensors, path)
    return path


def load(path: Path, layers: int = 5) -> Eagle3Head:
    return load_head(path, hidden_size=32, vocab_size=12, layers=layers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_load_and_decode_losslessly(layout: str, tmp_path: Path) -> None:
    config, arrange, write = LAYOUTS[layout]
    tensors = weights(config)
    path = written(tmp_path, config, arrange(tensors), write)
    head = load(path)
    state, close = head.state_dict(), 1e-3 if layout == "half precision" else 0.0
    assert set(state) == set(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(state[name], tensor, rtol=close, atol=close)
    assert all(p.dtype == torch.float32 for p in head.parameters())
    family: Any = "llama" if config is EAGLE else "qwen3"
    engine = ReferenceEngine(tiny_target(0, family), head)
    expected = method("greedy").session(engine).generate(tiny_prompt(0), 24).tokens
    assert method("eagle3").session(engine).generate(tiny_prompt(0), 24).tokens == expected


def test_what_a_configuration_leaves_out_takes_the_value_it_was_trained_with(
    tmp_path: Path,
) -> None:
    def config(raw: dict[str, Any], layers: int = 32) -> HeadConfig:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        as_safetensors(weights(raw), tmp_path)
        return load(tmp_path, layers).config

    eagle = config(EAGLE)
    assert (eagle.head_dim, eagle.rope_theta) == (8, 10_000.0)
    assert eagle.aux_layers == (2, 16, 29)
    assert config(ANGELSLIM, 36).aux_layers == (2, 18, 33)
    assert config(ANGELSLIM).head_dim == 16
    assert config(SPECFORGE).aux_layers == (1, 3, 4)
    newer = {k: v for k, v in SPECFORGE.items() if k not in ("rope_theta", "rope_scaling")}
    rope = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert config(newer | rope).rope_theta == 5e5
    named = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    assert config(EAGLE | named).aux_layers == (0, 2, 4)


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    config = EAGLE | {"draft_vocab_size": 12}
    tensors = {n: t for n, t in weights(config).items() if n not in ("d2t", "t2d")}
    for vocabulary in (12, None):
        path = written(tmp_path, config | {"draft_vocab_size": vocabulary}, tensors, as_bin)
        head = load(path)
        assert head.target_ids.tolist() == list(range(12))
        assert bool(head.t2d.all())


class Payload:
    """Unpickling it would make a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    torch.save({"fc.weight": Payload(tmp_path / "owned")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no EAGLE3 head can be read"):
        load(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"intermediate_size": 41}, "EAGLE3 layout"),
        ({"hidden_size": 64}, "hidden size 64"),
        ({"vocab_size": 20}, "vocabulary 20"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, "the target has 5"),
        ({"num_attention_heads": None}, "no EAGLE3 head can be read"),
    ],
)
def test_a_head_with_other_arithmetic_or_of_another_target_is_refused(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = written(tmp_path, EAGLE | change, weights(EAGLE), as_safetensors)
    with pytest.raises(ModelError, match=named):
        load(path)


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    tensors = weights(EAGLE)
    for missing, told in (("d2t", "no map 'd2t'"), ("fc.weight", r"fc\.weight")):
        rest = {n: t for n, t in tensors.items() if n != missing}
        path = written(tmp_path, EAGLE, rest, as_safetensors)
        with pytest.raises(ModelError, match=told):
            load(path)
    with pytest.raises(ModelError, match="depth is needed"):
        load_head(path, hidden_size=32, vocab_size=12)
