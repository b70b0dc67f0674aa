"""Heads as they are written: in the layout that vLLM reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipelines.lab.drafter.checkpoint import CONFIG, WEIGHTS, HeadConfig
from pipelines.lab.drafter.head import Eagle3Head


def save_head(head: Eagle3Head, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the layout that vLLM reads."""
    weights = {
        name: (t.to(dtype) if t.is_floating_point() else t).contiguous()
        for name, t in head.state_dict().items()
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(configuration(head.config), indent=1) + "\n")
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})


def configuration(config: HeadConfig) -> dict[str, Any]:
    """The ``config.json`` that vLLM reads."""
    shape = asdict(config)
    layers = list(shape.pop("aux_layers"))
    theta = shape.pop("rope_theta")
    return shape | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layers,
        },
        "dtype": "bfloat16",
    }
