"""Models for the reference engine: directories or hub names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from decoder.contracts.errors import ModelError
from decoder.engines.reference.engine import ReferenceEngine
from pipelines.lab.drafter.head import head_at


def load_engine(
    model: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    max_model_len: int | None = None,
) -> ReferenceEngine:
    """Load a target and, if named, its EAGLE3 head. ``dtype`` is the name of a torch dtype.

    Raises:
        ModelError: a model is missing, or the head does not fit the target.
    """
    disable_progress_bar()
    try:
        target = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelError(f"no target model can be read from {model}: {error}") from error
    read_head = head_at(drafter)
    return ReferenceEngine(
        target.to(device),
        read_head(target.config) if read_head is not None else None,
        tokenizer=tokenizer,
        stop_ids=_stop_ids(target, tokenizer),
        max_model_len=max_model_len,
    )


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-text tokens of the model's generation config and of its tokenizer, as in vLLM."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
