"""The target model of the reference engine: a transformers causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decoder.contracts.errors import ModelError
from decoder.engines.reference.kv_cache import KVCache


@dataclass(frozen=True)
class Read:
    """Outputs of a pass: ``logits`` (tokens, vocabulary), of all or of the last token; ``aux``
    (tokens, layers * hidden), the drafter's inputs, None without a drafter.
    """

    logits: Tensor
    aux: Tensor | None


class Target:
    """The model, shared by all sessions; it holds no state of requests.

    ``listens`` are the layers whose inputs the drafter gets, numbered as in vLLM.
    """

    def __init__(self, model: Any, listens: Sequence[int] = ()) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ("full_attention",))
        if kinds != {"full_attention"}:
            raise ModelError(
                f"this target has layers of {sorted(kinds)}: the reference engine rolls back "
                "rejected tokens, which needs full attention in every layer."
            )
        self.model = model.eval()
        self.embedding: nn.Module = model.get_input_embeddings()
        self._aux: list[Tensor] = []
        layers = model.get_decoder().layers
        for index in listens:
            layers[index].register_forward_pre_hook(self._record, with_kwargs=True)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = self.model.device
        return device

    def _record(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._aux.append(args[0] if args else kwargs["hidden_states"])

    def _run(self, tokens: Sequence[int], keep: int, **kwargs: Any) -> Read:
        self._aux.clear()
        ids = torch.tensor([tokens], device=self.device)
        logits = self.model(input_ids=ids, logits_to_keep=keep, **kwargs).logits[0]
        aux = torch.cat(self._aux, -1)[0] if self._aux else None
        self._aux.clear()
        return Read(logits, aux)

    def prefill(self, prompt: Sequence[int], cache: KVCache) -> Read:
        """Prefill a prompt; logits of its last token. Mutates ``cache``."""
        return self._run(prompt, 1, past_key_values=cache, use_cache=True)

    def verify(self, last: int, draft: Sequence[int], cache: KVCache) -> Read:
        """Run the last committed token and a draft; logits of all. Mutates ``cache``."""
        return self._run([last, *draft], 0, past_key_values=cache, use_cache=True)

    def listen(self, tokens: Sequence[int]) -> Tensor:
        """The drafter's inputs for a whole text, in one pass: (tokens, layers * hidden)."""
        aux = self._run(tokens, 1, use_cache=False).aux
        assert aux is not None
        return aux
