"""The target model of the reference engine: a transformers causal LM behind three verbs."""

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
    """What the target made of the tokens it read.

    ``logits`` (tokens, vocabulary), of the last token only where that was asked for; ``aux``
    (tokens, layers * hidden) when a drafter listens.
    """

    logits: Tensor
    aux: Tensor | None


class Target:
    """One model, its weights shared by all sessions; holds no request's state.

    ``listens`` names the layers whose inputs the drafter gets, as vLLM counts them.
    """

    def __init__(self, model: Any, listens: Sequence[int] = ()) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ("full_attention",))
        if kinds != {"full_attention"}:
            raise ModelError(
                f"this target has layers of {sorted(kinds)}: the reference engine takes back "
                "rejected tokens, which needs full attention in every layer."
            )
        self.model = model.eval()
        self.embedding: nn.Module = model.get_input_embeddings()
        self._heard: list[Tensor] = []
        layers = model.get_decoder().layers
        for index in listens:
            layers[index].register_forward_pre_hook(self._hear, with_kwargs=True)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        found: torch.device = self.model.device
        return found

    def _hear(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._heard.append(args[0] if args else kwargs["hidden_states"])

    def _run(self, tokens: Sequence[int], keep: int, **kwargs: Any) -> Read:
        self._heard.clear()
        ids = torch.tensor([tokens], device=self.device)
        logits = self.model(input_ids=ids, logits_to_keep=keep, **kwargs).logits[0]
        aux = torch.cat(self._heard, -1)[0] if self._heard else None
        self._heard.clear()
        return Read(logits, aux)

    def prefill(self, prompt: Sequence[int], cache: KVCache) -> Read:
        """Read a prompt; logits of its last token. Mutates ``cache``."""
        return self._run(prompt, 1, past_key_values=cache, use_cache=True)

    def verify(self, last: int, draft: Sequence[int], cache: KVCache) -> Read:
        """Read the last committed token and a draft behind it; logits of all. Mutates ``cache``."""
        return self._run([last, *draft], 0, past_key_values=cache, use_cache=True)

    def listen(self, tokens: Sequence[int]) -> Tensor:
        """The drafter's view of a whole text in one pass: (tokens, layers * hidden)."""
        aux = self._run(tokens, 1, use_cache=False).aux
        assert aux is not None
        return aux
