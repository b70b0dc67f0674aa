"""The reference engine: the paper's decoding loop, batch 1, over a transformers model.

::

    engine = ReferenceEngine.load("model", head_at("drafter"))  # pipelines.lab.drafter.head
    cache, policy = SuffixCache(engine.settings), frequency_policy("", 4.0)
    router = DraftRouter(cache, policy, engine.token_classes, Sink(None), model_len=4)
    generation = Session(engine, router, draft_tokens=4).generate(prompt_ids, max_tokens=128)

The :class:`~decoder.core.router.DraftRouter` is that of vLLM, so decisions, labels and events are
those of production.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from decoder.contracts.errors import ModelError
from decoder.contracts.features import TOKEN_CLASSES
from decoder.core.payoff.token_classes import token_classes_of
from decoder.engines.reference.target import Target
from decoder.settings import WorkerSettings


class ReferenceEngine:
    """Target, drafter and tokenizer, shared by sessions; one request at a time."""

    def __init__(
        self,
        model: Any,
        head: Any = None,
        *,
        tokenizer: Any = None,
        stop_ids: frozenset[int] = frozenset(),
        max_model_len: int | None = None,
        settings: WorkerSettings | None = None,
    ) -> None:
        self.target = Target(model, head.config.aux_layers if head else ())
        self.head = head.to(self.target.device, model.dtype) if head else None
        self.new_cache: Callable[[], Any] = DynamicCache
        """Makes a request's KV cache."""
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.max_model_len = max_model_len or int(model.config.max_position_embeddings)
        self.settings = settings or WorkerSettings.load()
        vocabulary = int(model.config.vocab_size)
        self.token_classes = np.zeros((vocabulary, len(TOKEN_CLASSES)), np.float32)
        if tokenizer is not None:
            self.token_classes = token_classes_of(tokenizer, vocabulary)

    @classmethod
    def load(
        cls,
        model: str | Path,
        read_head: Callable[[Any], Any] | None = None,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        settings: WorkerSettings | None = None,
        max_model_len: int | None = None,
    ) -> ReferenceEngine:
        """Load a target, a directory or a hub name.

        Args:
            read_head: loads the EAGLE3 head for the target's configuration; None for no drafter.
            dtype: name of a torch dtype.

        Raises:
            ModelError: a model is missing, or the head does not fit the target.
        """
        disable_progress_bar()
        try:
            target = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ModelError(f"no target model can be read from {model}: {error}") from error
        return cls(
            target.to(device),
            read_head(target.config) if read_head is not None else None,
            tokenizer=tokenizer,
            stop_ids=_stop_ids(target, tokenizer),
            max_model_len=max_model_len,
            settings=settings,
        )

    def drafter(self, length: int) -> Any:
        """The model drafter of a new request, for chains of ``length`` tokens; None for 0."""
        return self.head.drafter(self.target.embedding, length) if length and self.head else None

    def clock(self) -> float:
        """Seconds, after all work queued on the device is done."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-text tokens of the model's generation config and of its tokenizer, as in vLLM."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
