"""Packed linear layers compute what dense ones do, and each row alone."""

from __future__ import annotations

import torch
from torch import nn

from decoder.engines.reference.packed import PackedLinear, pack


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Sequential(nn.Linear(96, 40, bias=False)))


def test_a_packed_model_computes_what_it_did() -> None:
    model = layers()
    x = torch.randn(2, 7, 48)
    with torch.inference_mode():
        before = model(x)
        pack(model)
        after = model(x)
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == 2
    torch.testing.assert_close(after, before)


def test_what_cannot_be_packed_is_left_alone() -> None:
    model = layers().to(torch.bfloat16)
    pack(model)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


def test_a_row_does_not_depend_on_its_company() -> None:
    model = layers()
    pack(model)
    x = torch.randn(9, 48)
    with torch.inference_mode():
        together = model(x)
        alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
