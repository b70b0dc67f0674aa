"""What vLLM's CPU sampler does with temperatures and top_k, before and after it is mended.

What is mended is so in processes of their own: replacing functions here would reach other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoder.engines.vllm.sampling import (
    COUNTING_ROW,
    Written,
    apply_penalties,
    expand_batch_to_tokens,
    in_pieces,
    sparing_generators,
)

REGISTER = "from decoder.engines.vllm.plugin import register; register(); register()"
UNLUCKY = "torch.Tensor.new_empty = lambda x, n: torch.full((n,), 64.0, dtype=x.dtype)"
"""Memory that holds an earlier value: what an uninitialised tensor shows is then known."""
SCRIPT = """
import json, logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()

class Asked:
    all_greedy = False
    temperature = torch.tensor([0.5, 0.0, 2.0])
    top_k = top_p = None

class AskedTopK(Asked):
    top_k = torch.tensor([1, 4, 2], dtype=torch.int32)

def constrained(asked, counts):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(sum(counts), 1)
    cumulative = torch.cumsum(torch.tensor(counts), 0).int()
    return rejection_sampler.apply_sampling_constraints(logits, cumulative, asked)

{change}
seen = {{"scaled": constrained(Asked, [2, 1, 3]).tolist()}}
try:
    seen["empty"] = list(constrained(AskedTopK, [0, 0, 0]).shape)
    seen["kept"] = constrained(AskedTopK, [2, 1, 1]).isfinite().tolist()
except Exception as error:
    seen["error"] = str(error)
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
for beside in (None, "drafts"):
    try:
        SamplingParams(logprob_token_ids=[5])._validate_spec_decode(beside)
    except VLLMValidationError as error:
        seen["refused"] = [beside, str(error)]
print(json.dumps(seen))
"""


def seen(change: str) -> dict[str, Any]:
    """What the sampler of a fresh process shows after ``change``."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(change=change)],
        env=os.environ | {"HVD_WORKER_ENABLED": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def mended() -> dict[str, Any]:
    """By the plugin, as vLLM loads it, more than once."""
    return seen(REGISTER)


def scaled_by(*temperatures: float) -> list[list[float]]:
    return [[x / t for x in (1.0, 2.0, 3.0, 4.0)] for t in temperatures]


def naive(x: list[float], counts: list[int], swap: tuple[int, int] = (0, 0)) -> list[float]:
    out = []
    for value, count in zip(x, counts, strict=True):
        kept = swap[1] if swap[0] != swap[1] and value == swap[0] else value
        out += [kept] * count
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("swap", [(0, 0), (0, 1), (3, 7)])
@pytest.mark.parametrize("counts", [[1], [2, 3, 1], [0, 4, 0, 2], [0, 0]])
def test_each_request_keeps_its_value_for_all_its_tokens(
    counts: list[int], swap: tuple[int, int], dtype: torch.dtype
) -> None:
    x = torch.tensor([3, 0, 5, 0][: len(counts)], dtype=dtype)
    before = x.clone()
    cumulative = torch.cumsum(torch.tensor(counts), 0).int()
    got = expand_batch_to_tokens(x, cumulative, sum(counts), *swap)
    assert got.dtype == dtype
    assert got.tolist() == naive(x.tolist(), counts, swap)
    assert torch.equal(x, before)


ASKED = scaled_by(0.5, 0.5, 1.0, 2.0, 2.0, 2.0)
"""Two, one and three drafted tokens at temperatures 0.5, 0 (left unscaled) and 2."""


def test_logits_are_divided_by_the_temperature_their_request_asked_for(
    mended: dict[str, Any],
) -> None:
    assert mended["scaled"] == ASKED


def test_top_k_is_applied_to_each_requests_rows(mended: dict[str, Any]) -> None:
    only, every, two = [False] * 3 + [True], [True] * 4, [False] * 2 + [True] * 2
    assert mended["kept"] == [only, only, every, two]


def test_top_k_survives_a_step_without_drafts(mended: dict[str, Any]) -> None:
    assert mended["empty"] == [0, 4]


def test_probabilities_of_named_tokens_are_refused_beside_drafts(mended: dict[str, Any]) -> None:
    beside, sentence = mended["refused"]
    assert beside == "drafts" and sentence.startswith("logprob_token_ids are not supported")


@pytest.mark.long
def test_vllm_alone_has_both_faults() -> None:
    alone = seen(UNLUCKY)
    assert alone["scaled"] == scaled_by(*[64.0] * 6)
    assert "max(): Expected reduction dim" in alone["error"]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_log_probabilities_of_some_requests_at_a_time_are_those_of_all(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    # what vLLM compiles for it, without a compiler's half minute
    compiled = "vllm.v1.sample.sampler.batched_count_greater_than"
    monkeypatch.setattr(compiled, lambda x, least: (x >= least).sum(-1))
    drafts, width, vocabulary = [3, 0, 1, 2, 0], 4, 7
    counts = torch.tensor(drafts)
    ends = (counts + 1).cumsum(0)
    bonus = ends - 1
    target = torch.tensor([i for i in range(11) if i not in bonus.tolist()])
    metadata = SpecDecodeMetadata(
        torch.zeros(6, dtype=torch.int32), drafts, counts.cumsum(0).int(), ends.int(), target,
        bonus, torch.arange(11),
    )  # fmt: skip
    lots = torch.Generator().manual_seed(1)
    logits = torch.randn(11, vocabulary, generator=lots)
    ids = torch.randint(-1, vocabulary, (5, width), generator=lots, dtype=torch.int32)
    sampler, asked = SimpleNamespace(sampler=Sampler, is_logits_logprobs_mode=False), []

    def get(*given: Any) -> Any:
        asked.append(len(given[-1]))
        return RejectionSampler._get_logprobs_tensors(*given)

    given = (sampler, 2, metadata, logits, logits[target], logits[bonus], ids)
    whole = get(*given)
    pieces = in_pieces(get, budget=4 * vocabulary * width * (at_once + 1))(*given)
    assert max(asked[1:]) <= at_once + 1 and len(asked) > 2
    for one, other in zip(pieces[:3], whole[:3], strict=True):
        assert torch.equal(one, other)


def test_a_seeded_request_whose_prompt_is_read_in_parts_ends_nothing() -> None:
    def bookkeeping(runner: Any) -> str:
        for generator in runner.input_batch.generators.values():  # as vLLM winds it back
            generator.set_offset(generator.get_offset() - 4)
        return "kept"

    generators = {3: torch.Generator("cpu").manual_seed(7)}
    runner = SimpleNamespace(input_batch=SimpleNamespace(generators=generators))
    with pytest.raises(RuntimeError, match="offset"):
        bookkeeping(runner)
    assert sparing_generators(bookkeeping)(runner) == "kept"
    assert runner.input_batch.generators is generators


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_penalties_are_vllms_own_and_touch_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from vllm.model_executor.layers import utils
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    lots, vocabulary, requests, at_once = torch.Generator().manual_seed(seed), 11, 6, 2

    def some(most: int) -> list[int]:
        n = int(torch.randint(0, most, (1,), generator=lots))
        return torch.randint(0, vocabulary, (n,), generator=lots).tolist()  # type: ignore[no-any-return]

    drafts = [some(6) for _ in range(requests)]
    counts = [len(draft) for draft in drafts]
    on = torch.tensor([0, 1, 0, 1, 0, 1]).float()
    asked = SimpleNamespace(
        no_penalties=False, output_token_ids=[some(20) for _ in range(requests)],
        spec_token_ids=drafts, prompt_token_ids=torch.randint(0, vocabulary + 1, (requests, 9)),
        presence_penalties=on * torch.randn(requests, generator=lots),
        frequency_penalties=on * torch.randn(requests, generator=lots),
        repetition_penalties=1 + on * torch.rand(requests, generator=lots),
    )  # fmt: skip
    metadata = SimpleNamespace(num_draft_tokens=counts)
    repeat = torch.arange(requests).repeat_interleave(torch.tensor(counts))
    logits = torch.randn(sum(counts), vocabulary, generator=lots)
    lists = RejectionSampler._combine_outputs_with_spec_tokens(asked.output_token_ids, drafts)
    assert list(Written.of(asked.output_token_ids, drafts)) == lists
    theirs = RejectionSampler.apply_penalties(logits.clone(), asked, metadata, repeat, lists)
    touched, real = [], utils.apply_penalties

    def counted(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        touched.append(len(rows))
        return real(rows, *rest)

    monkeypatch.setattr(utils, "apply_penalties", counted)
    budget = 4 * vocabulary * COUNTING_ROW * at_once
    monkeypatch.setattr("decoder.engines.vllm.sampling.COUNTING_BYTES", budget)
    ours = apply_penalties(logits.clone(), asked, metadata, repeat, lists)
    assert torch.equal(ours, theirs)
    assert max(touched, default=0) <= at_once
    assert sum(touched) == sum(counts[1::2])
