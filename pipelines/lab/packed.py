"""Linear layers packed for a processor, so that a step's cost is that of reading the weights.

PyTorch's float32 matrix product packs the weights anew in each call that has more than one row: on
an AVX2 machine the layers of a small model took 2.3 times as long for five tokens as for one, and
no speculation could pay. oneDNN packs them once; five tokens then take 1.3 times as long as one.
Its rows do not depend on how many there are, which helps the output to stay the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decoder.engines.reference.engine import ReferenceEngine
from pipelines.lab.kv_cache import KVCache


class PackedLinear(nn.Module):
    """The linear map of ``dense``, float32 on a CPU, for inference alone.

    The weights are copied; ``dense`` can be dropped.
    """

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        # Plain attributes: an opaque tensor can neither be moved nor saved as a parameter can.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach())
        self._bias = None if dense.bias is None else dense.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out


def pack(engine: ReferenceEngine) -> None:
    """Replace the linear layers of target and drafter where this torch can pack them, and the KV
    cache by one that copies nothing. Mutates."""
    engine.new_cache = KVCache
    for model in (engine.target.model, engine.head):
        if model is not None:
            pack_layers(model)


def pack_layers(model: nn.Module) -> None:
    """Replace the linear layers of ``model`` where this torch can pack them. Mutates it."""
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and _packable(layer.weight):
                setattr(parent, name, PackedLinear(layer))


def _packable(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"
