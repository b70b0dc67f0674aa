from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from decoder.contracts.errors import ProcessError
from pipelines import machine
from pipelines.demo.breakage import OPTIONS, Breakage, set_broken


def worker() -> Breakage:
    head = torch.nn.Module()
    head.model = torch.nn.Module()
    head.model.norm = torch.nn.LayerNorm(4, bias=False)
    made = Breakage()
    made.model_runner = SimpleNamespace(drafter=SimpleNamespace(model=head))
    return made


def test_a_broken_drafter_is_wrong_about_everything_and_a_mended_one_is_as_it_was() -> None:
    broken = worker()
    norm = broken.model_runner.drafter.model.model.norm
    hidden = torch.tensor([0.5, -1.0, 2.0, 0.1])
    before = norm(hidden)
    broken.set_drafter_broken("no")
    assert torch.equal(norm(hidden), before)
    for _ in range(2):  # said twice it does no more
        broken.set_drafter_broken("yes")
        assert torch.equal(norm(hidden), -before)
    broken.set_drafter_broken("no")
    assert torch.equal(norm(hidden), before)


def test_the_class_is_where_the_worker_is_told_to_find_it() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(OPTIONS[-1]) is Breakage


def test_a_worker_that_does_not_break_ends_the_demo_with_a_sentence() -> None:
    with pytest.raises(ProcessError, match="could not be broken"):
        set_broken(f"http://127.0.0.1:{machine.free_port()}", True)
