"""Linear layers with packed weights, so that a CPU step costs about one read of the weights.

PyTorch's float32 matrix product packs the weights in each call with more than one row. On an AVX2
machine a small model's layers took 2.3 times as long for five tokens as for one, so speculation
could not pay. oneDNN packs once, and five tokens take 1.3 times as long. Its rows do not depend on
how many there are, which keeps the output that of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decoder.engines.reference.engine import ReferenceEngine
from pipelines.lab.kv_cache import KVCache


class PackedLinear(nn.Module):
    """The linear map of ``dense`` for inference in float32 on a CPU. The weights are copied."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        # plain attributes: an opaque tensor cannot be moved or saved like a parameter
        self._weight = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach())
        self._bias = None if dense.bias is None else dense.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out


def pack(engine: ReferenceEngine) -> None:
    """Pack the linear layers of target and drafter, where this torch can, and replace the KV cache
    by one that does not copy. Mutates."""
    engine.new_cache = KVCache
    for model in (engine.target.model, engine.head):
        if model is not None:
            pack_layers(model)


def pack_layers(model: nn.Module) -> None:
    """Pack the linear layers of ``model``, where this torch can. Mutates it."""
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and _packable(layer.weight):
                setattr(parent, name, PackedLinear(layer))


def _packable(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"
