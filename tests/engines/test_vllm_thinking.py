"""A budget for thinking is counted in a batch of which others have drafts as in one without any."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoder.engines.vllm.v1.sampling import AROUND

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

VOCABULARY, STEPS, ROWS = 8, 60, 5
STARTS, ENDS = [6], [7, 5]
BUDGETS = {1: 0, 3: 4, 4: 9}
"""By place in the batch; the others have none."""

Drafts = Callable[[int], list[list[int]]]


def text_of(place: int) -> list[int]:
    """What the target would write: thinking begins, ends, and begins again."""
    drawn = random.Random(place)
    return [drawn.choice([0, 1, 2, 3, 4, 6, 7]) for _ in range(STEPS)]


def holder_of(drafted: bool) -> Any:
    """vLLM's own, wrapped as the plugin wraps it where anything drafts."""
    from vllm.config.reasoning import ReasoningConfig
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    def wrapped(name: str) -> Any:
        own = getattr(ThinkingBudgetStateHolder, name)
        return lambda self, *args, **kwargs: AROUND[name](own, self, *args, **kwargs)

    names = ("sync_batch", "update_state", "apply_to_logits")
    wrappers = {name: wrapped(name) for name in names}
    patched = type("Patched", (ThinkingBudgetStateHolder,), wrappers)

    config = ReasoningConfig(reasoning_start_str="start", reasoning_end_str="end")
    config._reasoning_start_token_ids, config._reasoning_end_token_ids = STARTS, ENDS
    kind, drafts = (patched, 64) if drafted else (ThinkingBudgetStateHolder, 0)
    return kind(config, ROWS, drafts, torch.device("cpu"), False)


def written(holder: Any, drafts: Drafts, beside_drafts: bool) -> list[list[int]]:
    """What each request writes; those without a budget write what their text says."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    outputs: list[list[int]] = [[] for _ in range(ROWS)]
    asked = (SamplingParams(thinking_token_budget=BUDGETS.get(i)) for i in range(ROWS))
    added = [(i, given, [0, 6, 1], outputs[i]) for i, given in enumerate(asked)]
    holder.sync_batch(BatchUpdate(ROWS, [], added, []))
    for step in range(STEPS):
        spec = drafts(step)
        wanted = torch.tensor([text_of(i)[step] for i in range(ROWS)])
        behind = torch.nn.functional.one_hot(wanted, VOCABULARY).float()
        rows = behind.repeat_interleave(torch.tensor([len(d) for d in spec]), 0)
        holder.update_state(outputs, spec, repeat_indices=None)
        behind = holder.apply_to_logits(behind, beside_drafts, spec)
        if beside_drafts:  # vLLM's rejection sampler asks for all places, be there any or none
            rows = holder.apply_to_logits(rows, predict_bonus_token=False, spec_token_ids=spec)
        ends = 0
        for i, own in enumerate(spec):
            of_own = rows[ends : ends + len(own)]
            ends += len(own)
            # of a draft that is none, the first token is judged in the row of its first place
            logits = of_own[0] if own and i in BUDGETS else behind[i]
            outputs[i].append(int(logits.argmax()))
            if i not in BUDGETS:
                assert [int(r.argmax()) for r in of_own] == [text_of(i)[step]] * len(own)
    return outputs


def nobody(step: int) -> list[list[int]]:
    return [[] for _ in range(ROWS)]


def others(step: int) -> list[list[int]]:
    """Those without a budget have drafts, now and then."""
    drawn = random.Random(step)
    return [[1] * drawn.choice([0, 0, 3, 7]) if i not in BUDGETS else [] for i in range(ROWS)]


def kept(step: int) -> list[list[int]]:
    """vLLM keeps places for the drafts of a request that comes back: there are none in them."""
    return [[-1] * 4 if step % 3 == 0 and i != 2 else [] for i in range(ROWS)]


@pytest.mark.parametrize("drafts", [nobody, others, kept])
def test_thinking_ends_where_it_does_without_drafts(drafts: Drafts) -> None:
    expected = written(holder_of(drafted=False), nobody, False)
    assert any(out != text_of(i) for i, out in enumerate(expected)), "no budget was used up"
    assert written(holder_of(drafted=True), drafts, True) == expected


def test_a_thinking_budget_ends_with_its_request() -> None:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    device = torch.device("cpu")
    batch = InputBatch(ROWS, 64, 64, device, VOCABULARY, [8], [8], num_spec_tokens=64)
    batch.thinking_budget_state_holder = holder = holder_of(drafted=True)
    for name, budget in (("ends", 0), ("moves", None)):
        asked = SamplingParams(thinking_token_budget=budget)
        batch.add_request(CachedRequestState(name, [0, 6, 1], [], asked, None, ([0],), 0, []))
    batch.refresh_metadata()
    assert holder.has_tracked_requests()
    batch.remove_request("ends")
    batch.condense()
    batch.refresh_metadata()
    assert batch.req_ids == ["moves"]
    holder.update_state([[]], [[]])
    assert not holder.apply_to_logits(torch.zeros(1, VOCABULARY), True, [[]]).any()
