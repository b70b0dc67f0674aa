"""EAGLE3 checkpoints on disk: published layouts, and the one this project writes.

All contain ``fc``, one decoder layer, ``norm``, ``lm_head`` and the vocabulary map ``d2t``,
``t2d``. They differ in file format and configuration (paper, Table 5):

=========================================  ======================  ================================
published by                               weights                 ``config.json``
=========================================  ======================  ================================
EAGLE (``yuhuili/EAGLE3-LLaMA3.1-...``)    ``pytorch_model.bin``   Llama's; no ``head_dim``,
                                                                   ``rope_theta`` or aux layers
AngelSlim (``AngelSlim/Qwen3-4B_eagle3``)  ``model.safetensors``   heads wider than ``hidden_size``;
                                                                   no aux layers
SpecForge (``Tengyunw/qwen3_8b_eagle3``)   ``model.safetensors``   aux layers in ``eagle_config``
vLLM, and ``hvd train-drafter``            ``model.safetensors``   aux layers in both places
=========================================  ======================  ================================

The layer's prefix is ``midlayer.`` or ``layers.0.``, with or without ``model.`` before it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decoder.contracts.errors import ModelError

WEIGHTS, CONFIG, PICKLED = "model.safetensors", "config.json", "pytorch_model.bin"

FOREIGN_ARITHMETIC: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of later variants: same tensor names, other arithmetic. Drafts would silently be noise."""


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head. ``aux_layers`` count as in vLLM: ``i`` is the input of layer ``i``."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    aux_layers: tuple[int, ...]


def read_config(raw: Mapping[str, Any], target_layers: int | None) -> HeadConfig:
    """Parse a published ``config.json``.

    Args:
        target_layers: depth of the target model; needed if ``raw`` names no aux layers.

    Raises:
        ModelError: another kind of head, or unsupported arithmetic.
        KeyError: a size is missing.
    """
    eagle = raw.get("eagle_config") or {}
    unsupported = [flag for flag in FOREIGN_ARITHMETIC if raw.get(flag) or eagle.get(flag)]
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type")) or rope.get("rope_type") or "default"
    if kind != "default":
        unsupported.append(f"rope scaling {kind!r}")
    if raw.get("hidden_act", "silu") != "silu":
        unsupported.append(f"activation {raw['hidden_act']!r}")
    if unsupported:
        raise ModelError(
            f"this EAGLE3 head needs {', '.join(unsupported)}, which is not supported: use a head "
            "of the plain Llama form."
        )
    layers = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if not layers:
        if target_layers is None:
            raise ModelError("this EAGLE3 head names no aux layers: the target's depth is needed.")
        layers = (2, target_layers // 2, target_layers - 3)  # low, middle and high
    heads = int(raw["num_attention_heads"])
    return HeadConfig(
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        vocab_size=int(raw["vocab_size"]),
        draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        aux_layers=tuple(int(layer) for layer in layers),
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors"))
    if files:
        return {name: t for file in files for name, t in load_file(file).items()}
    # weights_only: torch refuses a pickle that would run code.
    weights: dict[str, Tensor] = torch.load(
        path / PICKLED, map_location="cpu", weights_only=True, mmap=True
    )
    return weights


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return "midlayer." + rest if (rest := name.removeprefix("layers.0.")) != name else name


def normalised(weights: Mapping[str, Tensor], config: HeadConfig) -> dict[str, Tensor]:
    """``weights`` under this project's names, with the vocabulary map filled in.

    Embeddings are left out: heads are trained with the target's, which are used here too.

    Raises:
        ModelError: a reduced draft vocabulary without ``d2t``.
    """
    out = {_plain_name(name): tensor for name, tensor in weights.items()}
    for unused in ("embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq"):
        out.pop(unused, None)
    size = config.draft_vocab_size
    if "d2t" not in out:
        if size != config.vocab_size:
            raise ModelError(f"this EAGLE3 head drafts {size} token ids but has no map 'd2t'.")
        out["d2t"] = torch.zeros(size, dtype=torch.int64)
    out["d2t"] = out["d2t"].to(torch.int64)
    drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
    drafted[out["d2t"] + torch.arange(len(out["d2t"]))] = True
    out["t2d"] = drafted
    return out


def read_checkpoint(path: Path, target_layers: int | None) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Read a head's shape and weights from a directory: on the CPU, in their stored dtype.

    Raises:
        ModelError: the directory holds no readable EAGLE3 head.
    """
    try:
        config = read_config(json.loads((path / CONFIG).read_text()), target_layers)
        return config, normalised(_read_tensors(path), config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (
        OSError, KeyError, TypeError, ValueError, IndexError, RuntimeError, SafetensorError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        raise ModelError(f"no EAGLE3 head can be read from {path}: {error!r}") from error
