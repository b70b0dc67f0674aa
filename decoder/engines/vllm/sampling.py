"""Faults of vLLM 0.32's sampling: three of its CPU backend, three beside drafts.

====================================  ==========================================================
``expand_batch_to_tokens``            returns uninitialised memory as temperatures: its kernel is
                                      handed a converted copy of the output that is never copied
                                      back
``apply_top_k_top_p`` on no rows      raises ``max(): Expected reduction dim ...`` in a step that
                                      verifies no draft, for instance the one that reads a prompt
``_bookkeeping_sync``                 winds the generator of a seeded request back where a step read
                                      a part of its prompt only; a CPU's has no offset, and the
                                      engine ends with ``CPU Generator does not use offset``
``_get_logprobs_tensors``             pads every request to the longest draft of the step, and
                                      copies that twice: a request for log probabilities beside 127
                                      others, one of which verifies 64 tokens, takes 8.5 GB where
                                      the vocabulary has 128K entries
``ThinkingBudgetStateHolder``         takes the places that a request has for drafts for tokens,
                                      where it comes back after others and there are none in them
``apply_penalties``                   counts the vocabulary for each row of every request, and
                                      copies its output, where one request is penalised: 8.4 times
                                      the memory of the logits
====================================  ==========================================================

Greedy requests meet none of the first three; the third needs no drafts, and ends plain vLLM too.
The functions are replaced where vLLM looks them up, by ones with the same signature and the
documented meaning; but a generator that cannot be wound back goes on, so a seeded request whose
prompt is read in several steps draws other numbers than one whose prompt is read at once. Log
probabilities and penalties are made of some rows at a time, on any device. A request with a budget
for thinking has no drafts (``asked``), and is told where to end as if nobody had any.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from decoder.room import LOGITS_BYTES, tokens_of_logits

_MARK: Final = "_hvd_mended"
_CERTAIN: Final = 1e9
"""The logit that vLLM gives a token that has to come."""
COUNTING_BYTES: Final = LOGITS_BYTES // 8
"""Memory for counts of the vocabulary, beside the logits."""
COUNTING_ROW: Final = 9
"""Times a row's logits that its counts take: two of int64, two masks, two products."""

Masking = Callable[[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]


def mend_sampling() -> None:
    """Replace the last three, and on a CPU all; repeated calls change nothing more."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sampler: Any = rejection_sampler.RejectionSampler
    if hasattr(sampler._get_logprobs_tensors, _MARK):
        return
    sampler._get_logprobs_tensors = in_pieces(sampler._get_logprobs_tensors)
    ThinkingBudgetStateHolder.update_state = without_drafts(ThinkingBudgetStateHolder.update_state)
    ThinkingBudgetStateHolder.apply_to_logits = end_thinking
    sampler.apply_penalties = staticmethod(apply_penalties)
    sampler._combine_outputs_with_spec_tokens = staticmethod(Written.of)
    if not current_platform.is_cpu():
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_top_k_top_p = _sparing_empty(rejection_sampler.apply_top_k_top_p)
    GPUModelRunner._bookkeeping_sync = sparing_generators(GPUModelRunner._bookkeeping_sync)


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value once for each of its tokens.

    Args:
        x: (requests,) of any dtype.
        cu_num_tokens: int (requests,) tokens of all requests up to and including each.
        num_tokens: the last of these.
        replace_from, replace_to: a value to write in place of another; equal means none.

    Returns:
        (num_tokens,) in the dtype of ``x``, which is not modified.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)


def _sparing_empty(apply: Masking) -> Masking:
    @functools.wraps(apply)
    def masked(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> torch.Tensor:
        return logits if not len(logits) else apply(logits, k, p)

    return masked


def in_pieces(get: Callable[..., Any], budget: int = LOGITS_BYTES) -> Callable[..., Any]:
    """A rejection sampler's ``_get_logprobs_tensors``, of some requests at a time.

    Args:
        get: takes sampler, count, metadata, logits, those of drafts, those behind them, and token
            ids [requests, longest draft + 1]; its tensors have a row for each of these ids.
        budget: bytes that the float32 logits of one call may take.
    """

    @functools.wraps(get)
    def gathered(
        sampler: Any, count: int, metadata: Any, logits: torch.Tensor, *given: torch.Tensor
    ) -> Any:
        *parts, ids = given
        requests, width = ids.shape
        at_once = max(tokens_of_logits(logits.shape[-1], budget) // width - 1, 1)
        if requests <= at_once:
            return get(sampler, count, metadata, logits, *parts, ids)
        found = []
        for begin in range(0, requests, at_once):
            # It takes each request's first row from the one before, so that comes along.
            before = min(begin, 1)
            some = slice(begin - before, begin + at_once)
            own = dataclasses.replace(
                metadata, cu_num_sampled_tokens=metadata.cu_num_sampled_tokens[some]
            )
            made = get(sampler, count, own, logits, *parts, ids[some])
            found.append([made[field][before * width :] for field in range(3)])
        return type(made)(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))

    setattr(gathered, _MARK, True)
    return gathered


class Written(Sequence[list[int]]):
    """What stands before each drafted token, made where it is looked at: a list for each row."""

    def __init__(self, outputs: list[list[int]], drafts: list[list[int]]) -> None:
        """Keep both, one entry for each request; nothing is copied."""
        self._outputs, self._drafts = outputs, drafts
        self._rows = [(i, n) for i, draft in enumerate(drafts) for n in range(len(draft))]

    @classmethod
    def of(cls, outputs: list[list[int]], drafts: list[list[int]] | None = None) -> Any:
        """``_combine_outputs_with_spec_tokens`` of a rejection sampler."""
        return outputs if drafts is None else cls(outputs, drafts)

    def __len__(self) -> int:
        """Drafted tokens of all requests."""
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        """Token ids before drafted token ``row``."""
        request, n = self._rows[row]
        return [*self._outputs[request], *self._drafts[request][:n]]


def apply_penalties(
    logits: torch.Tensor,
    sampling_metadata: Any,
    metadata: Any,
    repeat_indices: torch.Tensor,
    output_token_ids: Sequence[list[int]],
) -> torch.Tensor:
    """A rejection sampler's own, but only for rows of penalised requests and some at a time.

    Args:
        logits: float32 (drafted tokens, vocabulary); modified.
        sampling_metadata: what each request asked for.
        metadata: the drafts', with how many each request has.
        repeat_indices, output_token_ids: as vLLM gives them for each row; unused.

    Returns:
        ``logits``.
    """
    from vllm.model_executor.layers import utils

    if sampling_metadata.no_penalties:
        return logits
    kinds = (
        sampling_metadata.presence_penalties,
        sampling_metadata.frequency_penalties,
        sampling_metadata.repetition_penalties,
    )
    presence, frequency, repetition = kinds
    penalised = ((presence != 0) | (frequency != 0) | (repetition != 1)).tolist()
    vocabulary = logits.shape[-1]
    at_once = max(tokens_of_logits(vocabulary, COUNTING_BYTES) // COUNTING_ROW, 1)
    end = 0
    for request, count in enumerate(metadata.num_draft_tokens):
        begin, end = end, end + count
        if not count or not penalised[request]:
            continue
        drafted = (
            sampling_metadata.spec_token_ids[request] if sampling_metadata.spec_token_ids else []
        )
        written = [*sampling_metadata.output_token_ids[request], *drafted]
        tokens = torch.tensor(written, dtype=torch.int64).to(logits.device)
        tokens.masked_fill_(tokens == -1, vocabulary)
        before = len(sampling_metadata.output_token_ids[request])
        places = torch.arange(len(written), device=logits.device)
        for first in range(begin, end, at_once):
            rows = logits[first : min(first + at_once, end)]
            n = len(rows)
            seen = before + torch.arange(first - begin, first - begin + n, device=logits.device)
            utils.apply_penalties(
                rows,
                sampling_metadata.prompt_token_ids[request].expand(n, -1),
                torch.where(places < seen.unsqueeze(1), tokens, vocabulary),
                *(kind[request].repeat(n) for kind in kinds),
            )
    return logits


class _Unmoved:
    """Stands in for a generator that cannot be wound back."""

    def get_offset(self) -> int:
        """As of a generator that has drawn nothing."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Leave it as it is."""


def sparing_generators(bookkeeping: Callable[..., Any]) -> Callable[..., Any]:
    """``bookkeeping`` of a model runner, which sees stand-ins of its batch's generators."""

    @functools.wraps(bookkeeping)
    def spared(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        real = batch.generators
        batch.generators = dict.fromkeys(real, _Unmoved())
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            batch.generators = real

    return spared


def without_drafts(update: Callable[..., None]) -> Callable[..., None]:
    """A thinking budget's ``update_state`` that sees no drafts: places kept for some are none."""

    @functools.wraps(update)
    def updated(
        holder: Any, output_token_ids: Any, spec_token_ids: Any, repeat_indices: Any = None
    ) -> None:
        update(holder, output_token_ids, None, repeat_indices)

    return updated


def end_thinking(
    holder: Any,
    logits: torch.Tensor,
    predict_bonus_token: bool,
    spec_token_ids: list[list[int]],
) -> torch.Tensor:
    """Have each request whose budget is used up write the end of its thinking next.

    Args:
        holder: of the states by place in the batch, as its ``update_state`` left them.
        logits: changed in place; [requests, vocabulary] with ``predict_bonus_token``, else
            [tokens of drafts, vocabulary].
        spec_token_ids: drafts by request.
    """
    drafts, ends = [len(tokens) for tokens in spec_token_ids], holder.think_end_token_ids
    for place, state in holder._state.items():
        if bool(drafts[place]) == predict_bonus_token:
            continue  # its next token is among the others
        if state["in_end"] and state["force_index"] and state["end_count"] < len(ends):
            row = place if predict_bonus_token else sum(drafts[:place])
            logits[row, ends[state["end_count"]]] = _CERTAIN
    return logits
