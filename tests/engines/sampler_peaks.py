"""Memory of one step of vLLM's rejection sampler as the plugin leaves it, on the CPU.

By the shape of the step and what is asked for: the most bytes of tensors at once in a step that
verifies drafts and in one of plain decoding of the same requests, both as multiples of the former's
float32 logits.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from decoder.engines.vllm.v1 import sampling

VOCABULARY = 4096
SHAPES = {"even": [7] * 32, "one long": [127] + [0] * 31 + [10] * 16}
"""Drafted tokens of each request."""


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                kept = tensor.untyped_storage()
                if id(kept) not in self._held:
                    self._held[id(kept)] = kept.nbytes()
                    weakref.finalize(kept, self._freed, id(kept))
                    self._now += kept.nbytes()
                    self.most = max(self.most, self._now)
        return out

    def _freed(self, name: int) -> None:
        self._now -= self._held.pop(name)


def first(value: float, other: float) -> Callable[[int], torch.Tensor]:
    """The first request's value, and all others'."""
    return lambda requests: torch.tensor([value] + [other] * (requests - 1))


def ids(requests: int, *size: int) -> torch.Tensor:
    """Any tokens."""
    return torch.randint(0, VOCABULARY, (requests, *size))


def some(requests: int) -> torch.Tensor:
    """A mask of half of the vocabulary."""
    return torch.rand(requests, VOCABULARY) < 0.5


RANDOM: dict[str, Any] = {"all_greedy": False, "temperature": first(1.0, 0.0)}
PENALTIES: dict[str, Any] = {
    "no_penalties": False, "prompt_token_ids": lambda requests: ids(requests, 300)
}  # fmt: skip
LOGPROBS: dict[str, Any] = {"max_num_logprobs": 2}
ALLOWED: dict[str, Any] = {"allowed_token_ids_mask": some}
ALL = RANDOM | PENALTIES | LOGPROBS | ALLOWED | {"top_p": first(0.9, 0.9)}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {}, "random": RANDOM, "top_p of one": RANDOM | {"top_p": first(0.9, 1.0)},
    "top_p of all": RANDOM | {"top_p": first(0.9, 0.9)},
    "penalty of one": PENALTIES | {"presence_penalties": first(0.5, 0.0)},
    "penalty of all": PENALTIES | {"repetition_penalties": first(1.1, 1.1)},
    "allowed_token_ids": ALLOWED, "logprobs": LOGPROBS,
    "bad_words": {"bad_words_token_ids": {0: [[1, 2], [3]]}},
    "everything": ALL | {"repetition_penalties": first(1.1, 1.1)},
}  # fmt: skip


def step(counts: list[int], asked: dict[str, Any]) -> tuple[float, float]:
    """Most bytes with drafts of these lengths, and with none, as multiples of the logits'."""
    requests, drafted = len(counts), torch.tensor(counts)
    ends = (drafted + 1).cumsum(0)
    rows = int(ends[-1])
    behind = ends - 1
    target = torch.ones(rows, dtype=torch.bool).index_fill_(0, behind, False).nonzero().flatten()
    drafts = [ids(n).tolist() for n in counts]
    metadata = SpecDecodeMetadata(
        torch.cat([torch.tensor(draft, dtype=torch.int32) for draft in drafts]), counts,
        drafted.cumsum(0).int(), ends.int(), target, behind, torch.arange(rows),
    )  # fmt: skip
    given = SamplingMetadata(
        temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
        max_num_logprobs=None, logprob_token_ids=None, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=torch.zeros(requests), presence_penalties=torch.zeros(requests),
        repetition_penalties=torch.ones(requests), spec_token_ids=drafts,
        output_token_ids=[ids(300).tolist() for _ in counts], allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    made = {name: value(requests) if callable(value) else value for name, value in asked.items()}
    given = dataclasses.replace(given, **made)
    rejection = rejection_sampler.RejectionSampler(sampler.Sampler())
    # The share of what is made of some rows, where these are all that there is room for.
    sampling.SOME_BYTES = 4 * VOCABULARY * rows  # type: ignore[misc]
    with Peak() as speculative:
        rejection(metadata, None, torch.randn(rows, VOCABULARY), given)
    given = dataclasses.replace(given, spec_token_ids=[[] for _ in counts])
    with Peak() as plain:
        rejection.sampler(torch.randn(requests, VOCABULARY), given)
    size = 4 * VOCABULARY * rows
    return speculative.most / size, plain.most / size


def peaks() -> dict[str, dict[str, tuple[float, float]]]:
    """All of them."""
    # what vLLM compiles for it, without a compiler's half minute
    sampler.batched_count_greater_than = lambda x, least: (x >= least).sum(-1)
    return {
        shape: {name: step(counts, asked) for name, asked in ASKED.items()}
        for shape, counts in SHAPES.items()
    }
