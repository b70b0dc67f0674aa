"""What a process shows into which vLLM loads the plugin, and what its sampler does there."""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.ray.ray_env import get_env_vars_to_copy
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import decoder.engines.vllm.v2.runner
import decoder.engines.vllm.v2.worker  # noqa: F401
from decoder.contracts.errors import EngineError
from decoder.engines.vllm import contract, plugin
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
    sampling.CHUNK_BYTES = 4 * VOCABULARY * rows  # type: ignore[misc]
    with Peak() as speculative:
        rejection(metadata, None, torch.randn(rows, VOCABULARY), given)
    given = dataclasses.replace(given, spec_token_ids=[[] for _ in counts])
    with Peak() as plain:
        rejection.sampler(torch.randn(requests, VOCABULARY), given)
    size = 4 * VOCABULARY * rows
    return speculative.most / size, plain.most / size


def peaks() -> dict[str, dict[str, tuple[float, float]]]:
    """By the shape of the step and what is asked for: the most bytes of tensors at once in a step
    that verifies drafts and in one of plain decoding of the same requests, both as multiples of the
    former's float32 logits."""
    # what vLLM compiles for it, without a compiler's half minute
    plainly = mock.patch.object(
        sampler, "batched_count_greater_than", lambda x, n: (x >= n).sum(-1)
    )
    with plainly, mock.patch.object(sampling, "CHUNK_BYTES", 0):
        return {
            shape: {name: step(counts, asked) for name, asked in ASKED.items()}
            for shape, counts in SHAPES.items()
        }


def constrained(counts: list[int], top_k: list[int] | None = None) -> torch.Tensor:
    """Logits of requests at temperatures 0.5, 0 and 2 with so many drafted tokens, as they are
    drawn from."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(sum(counts), 1)
    asked = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5, 0.0, 2.0]), top_p=None,
        top_k=None if top_k is None else torch.tensor(top_k, dtype=torch.int32),
    )  # fmt: skip
    ends = torch.tensor(counts).cumsum(0).int()
    made: torch.Tensor = rejection_sampler.apply_sampling_constraints(logits, ends, asked)
    return made


def refused(beside: str | None) -> str:
    """What is said of a request for probabilities of named tokens, beside drafts or without."""
    try:
        SamplingParams(logprob_token_ids=[5])._validate_spec_decode(beside)
    except VLLMValidationError as error:
        return str(error)
    return ""


def copied_by_ray(others: str) -> list[str]:
    """Variables that Ray's workers get where those of prefixes ``others`` are asked for."""
    with mock.patch.dict(os.environ, VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=others):
        plugin.register()
        return sorted(get_env_vars_to_copy())


def main() -> dict[str, Any]:
    """All of it, behind loading the plugin: first on another vLLM, then twice."""
    streams = "vllm.v1.worker.cpu.shm" in sys.modules
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    with mock.patch.object(contract, "read", lambda *_: {}):
        try:
            plugin.register()
        except EngineError as error:
            other = [str(error), hasattr(GPUModelRunner.propose_draft_token_ids, "_hvd_wrapped")]
    plugin.register()
    plugin.register()
    return {
        "other": other, "streams": streams, "scaled": constrained([2, 1, 3]).tolist(),
        "empty": list(constrained([0, 0, 0], [1, 4, 2]).shape),
        "kept": constrained([2, 1, 1], [1, 4, 2]).isfinite().tolist(),
        "refused": [refused(None), refused("drafts")], "peaks": peaks(),
        "ray": {others: copied_by_ray(others) for others in ("", "MY_, OUR_")},
    }  # fmt: skip
