from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.demo.breakage import OPTIONS, Breakage, set_broken


def test_a_broken_drafter_is_wrong_about_everything_and_a_mended_one_is_as_it_was() -> None:
    norm, breakage = torch.nn.LayerNorm(4, bias=False), Breakage()
    head = SimpleNamespace(model=SimpleNamespace(norm=norm))
    breakage.model_runner = SimpleNamespace(drafter=SimpleNamespace(model=head))
    hidden = torch.tensor([0.5, -1.0, 2.0, 0.1])
    before = norm(hidden)
    for broken in ("no", "yes", "yes", "no", "no"):  # said twice it does no more
        breakage.set_drafter_broken(broken)
        assert torch.equal(norm(hidden), -before if broken == "yes" else before)


def test_the_class_is_where_the_worker_is_told_to_find_it() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(OPTIONS[-1]) is Breakage


def test_a_worker_that_does_not_break_ends_the_demo_with_a_sentence() -> None:
    with pytest.raises(ProcessError, match="could not be broken"):
        set_broken(f"http://127.0.0.1:{machine.free_port()}", True)
