"""The reference engine: the paper's decoding loop, batch 1, over a transformers model.

::

    engine = load_engine("model", "drafter")  # of pipelines.lab.reference
    cache, policy = SuffixCache(engine.settings), frequency_policy("", 4.0)
    router = DraftRouter(cache, policy, engine.token_classes, Sink(None), model_len=4)
    generation = Session(engine, router, draft_tokens=4).generate(prompt_ids, max_tokens=128)

The :class:`~decoder.core.router.DraftRouter` is that of vLLM, so decisions, labels and events are
those of production.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

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

    def drafter(self, length: int) -> Any:
        """The model drafter of a new request, for chains of ``length`` tokens; None for 0."""
        return self.head.drafter(self.target.embedding, length) if length and self.head else None

    def clock(self) -> float:
        """Seconds, after all work queued on the device is done."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()
