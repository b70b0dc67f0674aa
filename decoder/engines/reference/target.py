"""The target model of the reference engine: a transformers causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decoder.contracts.errors import ModelError


class Read(NamedTuple):
    """Outputs of a pass: ``logits`` (tokens, vocabulary), of all or of the last token; ``aux``
    (tokens, layers * hidden), the drafter's inputs, None without a drafter.
    """

    logits: Tensor
    aux: Tensor | None


class Target:
    """The model, shared by all sessions; it holds no state of requests.

    ``aux_layers`` are the layers whose inputs the drafter gets, numbered as in vLLM.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int] = ()) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ("full_attention",))
        if kinds != {"full_attention"}:
            raise ModelError(
                f"this target has layers of {sorted(kinds)}: the reference engine rolls back "
                "rejected tokens, which needs full attention in every layer."
            )
        self.model = model.eval()
        self.device: torch.device = model.device
        self.embedding: nn.Module = model.get_input_embeddings()
        self._aux: list[Tensor] = []
        layers = model.get_decoder().layers
        for index in aux_layers:
            layers[index].register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._aux.append(args[0] if args else kwargs["hidden_states"])

    def run(self, tokens: Sequence[int], cache: Any = None, last: bool = False) -> Read:
        """One pass over ``tokens``; logits of all or of the ``last``. Mutates ``cache``, a
        transformers one, which holds the tokens before."""
        self._aux.clear()
        logits = self.model(
            input_ids=torch.tensor([tokens], device=self.device), logits_to_keep=int(last),
            past_key_values=cache, use_cache=cache is not None,
        ).logits[0]  # fmt: skip
        aux = torch.cat(self._aux, -1)[0] if self._aux else None
        self._aux.clear()
        return Read(logits, aux)
