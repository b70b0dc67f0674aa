"""Our parts of vLLM's sampler do as its own, a few rows at a time; :mod:`tests.engines.mended` has
them in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder.core.guards.draft_budget import COPIES
from decoder.engines.vllm.v1 import sampling
from decoder.engines.vllm.v1.sampling import (
    SORTED_ROW_COPIES,
    TokensBefore,
    apply_penalties,
    expand_batch_to_tokens,
    in_chunks,
    only_where_asked,
    without_generators,
)


@given(
    st.lists(st.tuples(st.sampled_from([3, 0, 5]), st.integers(0, 4)), min_size=1, max_size=5),
    st.sampled_from([(0, 0), (0, 1), (3, 7)]),
    st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
def test_each_request_keeps_its_value_for_all_its_tokens(
    requests: list[tuple[int, int]], swap: tuple[int, int], dtype: torch.dtype
) -> None:
    x = torch.tensor([value for value, _ in requests], dtype=dtype)
    before, ends = x.clone(), torch.tensor([n for _, n in requests]).cumsum(0).int()
    got = expand_batch_to_tokens(x, ends, int(ends[-1]), *swap)
    assert got.dtype == dtype and torch.equal(x, before)
    swapped = [(swap[1] if value == swap[0] else value, n) for value, n in requests]
    assert got.tolist() == [value for value, n in swapped for _ in range(n)]


@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 11])
@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_chunked_logprobs_equal_those_of_all_rows_at_once(
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
    own = torch.arange(width) <= counts.unsqueeze(1)
    ids[~own] = -1
    sampler, asked = SimpleNamespace(sampler=Sampler, is_logits_logprobs_mode=False), []

    def get(*given: Any) -> Any:
        asked.append(len(given[3]))
        return RejectionSampler._get_logprobs_tensors(*given)

    # what was scaled, and what was not, are told apart
    given = (sampler, 2, metadata, logits, logits[target] * 2, logits[bonus] * 3, ids)
    whole = get(*given)
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 4 * COPIES * vocabulary * at_once)
    pieces = in_chunks(get, *given)
    assert max(asked[1:]) <= at_once and sum(asked[1:]) == len(logits)
    for one, other in zip(pieces[:3], whole[:3], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one[own.flatten()], other[own.flatten()])


def test_a_seeded_request_with_chunked_prefill_ends_nothing() -> None:
    def bookkeeping(runner: Any) -> str:
        for generator in runner.input_batch.generators.values():  # as vLLM winds it back
            generator.set_offset(generator.get_offset() - 4)
        return "kept"

    generators = {3: torch.Generator("cpu").manual_seed(7)}
    batch = SimpleNamespace(generators=generators)
    runner = SimpleNamespace(input_batch=batch, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="offset"):
        bookkeeping(runner)
    assert without_generators(bookkeeping, runner) == "kept"
    assert runner.input_batch.generators is generators


KINDS = {"presence": (1, 0, 0), "frequency": (0, 1, 0), "repetition": (0, 0, 1), "all": (1, 1, 1)}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("penalised", [(0, 1, 0, 0, 0, 0), (0, 1, 0, 1, 0, 1), (1,) * 6])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_penalties_equal_vllms_and_touch_rows_of_penalised_requests_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    penalised: tuple[int, ...],
    kinds: tuple[int, int, int],
) -> None:
    from vllm import _custom_ops
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    lots, vocabulary, requests, at_once = torch.Generator().manual_seed(seed), 11, 6, 2

    def some(most: int) -> list[int]:
        """Tokens, among them places without one yet."""
        n = int(torch.randint(0, most, (1,), generator=lots))
        return torch.randint(-1, vocabulary, (n,), generator=lots).tolist()  # type: ignore[no-any-return]

    drafts = [some(6) for _ in range(requests)]
    counts = [len(draft) for draft in drafts]
    on = torch.tensor(penalised).float()
    presence, frequency, repetition = (kind * on * torch.randn(6, generator=lots) for kind in kinds)
    asked = SimpleNamespace(
        no_penalties=False, output_token_ids=[some(20) for _ in range(requests)],
        spec_token_ids=drafts, presence_penalties=presence, frequency_penalties=frequency,
        repetition_penalties=1 + repetition.abs(),
        prompt_token_ids=torch.randint(0, vocabulary + 1, (1, 9)).expand(requests, -1),
    )  # fmt: skip
    metadata = SimpleNamespace(num_draft_tokens=counts)
    repeat = torch.arange(requests).repeat_interleave(torch.tensor(counts))
    logits = torch.randn(sum(counts), vocabulary, generator=lots)
    lists = RejectionSampler._combine_outputs_with_spec_tokens(asked.output_token_ids, drafts)
    theirs = RejectionSampler.apply_penalties(logits.clone(), asked, metadata, repeat, lists)
    touched, real = [], _custom_ops.apply_repetition_penalties

    def counted(rows: torch.Tensor, *rest: torch.Tensor) -> None:
        touched.append(len(rows))
        real(rows, *rest)

    monkeypatch.setattr(_custom_ops, "apply_repetition_penalties", counted)
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 4 * vocabulary * SORTED_ROW_COPIES * at_once)
    for _ in range(2):  # the second time in the same batch
        touched.clear()
        ours = apply_penalties(logits.clone(), asked, metadata, repeat, lists)
        assert torch.equal(ours, theirs)
        assert max(touched, default=0) <= at_once
        assert sum(touched) == sum(n for n, on in zip(counts, penalised, strict=True) if on)


TOKENS = st.lists(st.integers(-1, 2), max_size=5)


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@given(
    st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4),
    st.dictionaries(
        st.integers(0, 3),
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=3),
        max_size=4,
    ),
)
def test_bad_words_are_found_in_lists_built_on_access(
    texts: list[tuple[list[int], list[int]]], words: dict[int, list[list[int]]]
) -> None:
    from vllm.v1.sample.ops.bad_words import apply_bad_words_with_drafts
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    outputs, drafts = [text for text, _ in texts], [draft for _, draft in texts]
    counts = [len(draft) for draft in drafts]
    lists = RejectionSampler._combine_outputs_with_spec_tokens(outputs, drafts)
    written = TokensBefore(outputs, drafts)
    assert list(written) == lists and len(written) == len(lists)
    theirs, ours = torch.zeros(sum(counts), 3), torch.zeros(sum(counts), 3)
    apply_bad_words_with_drafts(theirs, words, lists, counts)
    apply_bad_words_with_drafts(ours, words, written, counts)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("with_k", [True, False])
@pytest.mark.parametrize("with_p", [True, False])
@pytest.mark.parametrize("at_once", [1, 2, 9])
@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_top_k_and_top_p_equal_vllms_and_sort_limited_rows_in_chunks(
    monkeypatch: pytest.MonkeyPatch, at_once: int, with_p: bool, with_k: bool
) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    vocabulary = 13
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(3))
    k = torch.tensor([vocabulary, 2, vocabulary, 5, vocabulary, 1], dtype=torch.int32)
    p = torch.tensor([1.0, 0.9, 0.5, 1.0, 1.0, 0.2])
    limits = k if with_k else None, p if with_p else None
    sorted_rows = []

    def apply(rows: torch.Tensor, *limits: torch.Tensor | None) -> torch.Tensor:
        sorted_rows.append(len(rows))
        out: torch.Tensor = apply_top_k_top_p_pytorch(rows, *limits, allow_cpu_sync=True)
        return out

    monkeypatch.setattr(sampling, "CHUNK_BYTES", 4 * vocabulary * SORTED_ROW_COPIES * at_once)
    ours = only_where_asked(apply, logits.clone(), *limits)
    theirs = apply_top_k_top_p_pytorch(logits.clone(), *limits, allow_cpu_sync=True)
    assert torch.equal(ours, theirs)
    asked = (with_k & (k < vocabulary)) | (with_p & (p < 1))
    assert sum(sorted_rows) == asked.sum() and max(sorted_rows, default=0) <= at_once
    assert k.tolist() == [vocabulary, 2, vocabulary, 5, vocabulary, 1]
