"""Faults of vLLM's sampling, 0.32's and 0.33's: three of its CPU backend, three beside drafts.

====================================  ==========================================================
``expand_batch_to_tokens``            returns uninitialised memory as temperatures: its kernel is
                                      handed a converted copy of the output that is never copied
                                      back
``apply_top_k_top_p`` on no rows      raises ``max(): Expected reduction dim ...`` in a step that
                                      verifies no draft, for instance the one that reads a prompt;
                                      sorts every row where one request asks for ``top_p``
``_bookkeeping_sync``                 winds the generator of a seeded request back where a step read
                                      a part of its prompt only; a CPU's has no offset, and the
                                      engine ends with ``CPU Generator does not use offset``
``_get_logprobs_tensors``             pads every request to the longest draft of the step, and
                                      copies that twice: a request for log probabilities beside 127
                                      others, one of which verifies 64 tokens, takes 8.5 GB where
                                      the vocabulary has 128K entries
``ThinkingBudgetStateHolder``         takes the places that a request has for drafts for tokens,
                                      where it comes back after others and there are none in them;
                                      holds the request that is moved into the place of one that
                                      ended to the budget of that one
``apply_penalties``                   counts the vocabulary for each row of every request, and
                                      copies its output, where one request is penalised: 8.4 times
                                      the memory of the logits
====================================  ==========================================================

Greedy requests meet none of the first three; the third needs no drafts, and ends plain vLLM too.
The functions are replaced where vLLM looks them up, by ones with the same signature and the
documented meaning; but a generator that cannot be wound back goes on, so a seeded request whose
prompt is read in several steps draws other numbers than one whose prompt is read at once. What a
row asks for beside the best token is made for the rows that ask, some at a time (``SOME_BYTES``),
with vLLM's own arithmetic: of its rows behind drafts, one a request as in plain decoding, all is
made as vLLM does. A request with a budget for thinking has no drafts (``asked``), and is told where
to end as if nobody had any.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import torch

from decoder.core.guards.draft_budget import COPIES, LOGITS_BYTES, tokens_of_logits

_MARK: Final = "_hvd_mended"
_PENALISED: Final = "_hvd_penalised"
_CERTAIN: Final = 1e9
"""The logit that vLLM gives a token that has to come."""
SOME_BYTES: Final = LOGITS_BYTES // COPIES
"""Memory for what is made of some rows at a time: one copy's share, since none of it is there
together with the probabilities of all rows."""
WORKED_ROW: Final = 6
"""Copies that a row takes while its tokens are counted or sorted."""

Masking = Callable[..., torch.Tensor]


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
    ThinkingBudgetStateHolder.sync_batch = leaving_budgets(ThinkingBudgetStateHolder.sync_batch)
    ThinkingBudgetStateHolder.update_state = without_drafts(ThinkingBudgetStateHolder.update_state)
    ThinkingBudgetStateHolder.apply_to_logits = end_thinking
    sampler.apply_penalties = staticmethod(apply_penalties)
    sampler._combine_outputs_with_spec_tokens = staticmethod(
        lambda outputs, drafts=None: outputs if drafts is None else Written(outputs, drafts)
    )
    if not current_platform.is_cpu():
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_top_k_top_p = sparing_others(rejection_sampler.apply_top_k_top_p)
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


def sparing_others(apply: Masking) -> Masking:
    """``apply_top_k_top_p``, of rows that ask for one of both, and some at a time.

    Rows that do not ask keep tokens whose probability is 0 where vLLM would mask them.
    """

    @functools.wraps(apply)
    def masked(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, *more: Any
    ) -> torch.Tensor:
        vocabulary = logits.shape[-1]
        asked = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if k is not None:
            asked |= k < vocabulary
        if p is not None:
            asked |= p < 1
        for rows in asked.nonzero().flatten().split(_at_once(vocabulary, WORKED_ROW)):
            if len(rows):
                own = (None if limit is None else limit[rows] for limit in (k, p))
                logits[rows] = apply(logits[rows], *own, *more)
        return logits

    return masked


def _at_once(vocabulary: int, copies: int) -> int:
    return tokens_of_logits(vocabulary, SOME_BYTES, copies)


def in_pieces(get: Callable[..., Any]) -> Callable[..., Any]:
    """A rejection sampler's ``_get_logprobs_tensors``, of some tokens at a time and none padded.

    Args:
        get: takes sampler, count, metadata, logits, those of drafts, those behind them, and token
            ids [requests, longest draft + 1]; its tensors have a row for each of these ids. Rows
            behind a request's draft and the token after it mean nothing.
    """

    @functools.wraps(get)
    def gathered(
        sampler: Any,
        count: int,
        metadata: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        bonus: torch.Tensor,
        ids: torch.Tensor,
    ) -> Any:
        from vllm.utils.torch_utils import async_tensor_h2d

        at_once, (_, width) = _at_once(logits.shape[-1], COPIES), ids.shape
        if ids.numel() <= at_once:
            return get(sampler, count, metadata, logits, target, bonus, ids)
        lengths = [drafted + 1 for drafted in metadata.num_draft_tokens]
        ends = list(accumulate(lengths))
        real = [i * width + j for i, n in enumerate(lengths) for j in range(n)]
        places = async_tensor_h2d(real, ids.device, torch.int64)
        tokens = ids.flatten()[places].unsqueeze(1)
        found = []
        for begin in range(0, len(logits), at_once):
            end = min(begin + at_once, len(logits))
            # Each request's last row is one behind its draft; each token is handed on as if it
            # were a request's only one.
            first, last = bisect_right(ends, begin), bisect_right(ends, end)
            drafted, behind = slice(begin - first, end - last), slice(first, last)
            own = dataclasses.replace(
                metadata,
                cu_num_sampled_tokens=torch.arange(1, end - begin + 1, device=ids.device),
                target_logits_indices=metadata.target_logits_indices[drafted] - begin,
                bonus_logits_indices=metadata.bonus_logits_indices[behind] - begin,
            )
            made = get(
                sampler, count, own, logits[begin:end], target[drafted], bonus[behind],
                tokens[begin:end],
            )  # fmt: skip
            found.append(made[:3])
        whole = []
        for tensors in zip(*found, strict=True):
            rows = torch.cat(tensors)
            whole.append(
                rows.new_zeros((ids.numel(), *rows.shape[1:])).index_copy_(0, places, rows)
            )
        return type(made)(*whole)

    setattr(gathered, _MARK, True)
    return gathered


class Written(Sequence[list[int]]):
    """What stands before each drafted token, made where it is looked at: a list for each row."""

    def __init__(self, outputs: list[list[int]], drafts: list[list[int]]) -> None:
        """Keep both, one entry for each request; nothing is copied."""
        self._outputs, self._drafts = outputs, drafts
        self._rows = [(i, n) for i, draft in enumerate(drafts) for n in range(len(draft))]

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

    What a request has written is counted once; each row's counts are these and its draft so far.

    Args:
        logits: float32 (drafted tokens, vocabulary); modified.
        sampling_metadata: what each request asked for; who is penalised is remembered in it.
        metadata: the drafts', with how many each request has.
        repeat_indices, output_token_ids: as vLLM gives them for each row; unused.

    Returns:
        ``logits``.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.utils import get_token_bin_counts_and_mask
    from vllm.utils.torch_utils import async_tensor_h2d

    if sampling_metadata.no_penalties:
        return logits
    device, vocabulary = logits.device, logits.shape[-1]
    at_once, penalised, end = _at_once(vocabulary, WORKED_ROW), _penalised(sampling_metadata), 0
    for request, count in enumerate(metadata.num_draft_tokens):
        begin, end = end, end + count
        if not count or not penalised[request]:
            continue
        own = slice(request, request + 1)
        presence = sampling_metadata.presence_penalties[own]
        frequency = sampling_metadata.frequency_penalties[own]
        repetition = sampling_metadata.repetition_penalties[own]
        written = sampling_metadata.output_token_ids[request]
        tokens = [*written, *sampling_metadata.spec_token_ids[request]]
        known = async_tensor_h2d(tokens, device, torch.int64).unsqueeze(0)
        known.masked_fill_(known == -1, vocabulary)  # a place without a token yet
        text, draft = known[:, : len(written)], known[:, len(written) :]
        prompt = sampling_metadata.prompt_token_ids[own]
        _, prompted = get_token_bin_counts_and_mask(prompt, vocabulary, 1)
        counts = get_token_bin_counts_and_mask(text, vocabulary, 1)[0].int()
        places = torch.arange(count, device=device)
        for first in range(begin, end, at_once):
            rows = logits[first : min(first + at_once, end)]
            n = len(rows)
            before = (places < places[first - begin :][:n].unsqueeze(1)) & (draft < vocabulary)
            drafted = draft.clamp(max=vocabulary - 1).expand(n, -1)
            seen = counts.repeat(n, 1).scatter_add_(1, drafted, before.int())
            is_seen = seen > 0
            _custom_ops.apply_repetition_penalties(
                rows, prompted.repeat(n, 1), is_seen, repetition.repeat(n)
            )
            rows -= frequency.unsqueeze(1) * seen
            rows -= presence.unsqueeze(1) * is_seen
    return logits


def _penalised(asked: Any) -> list[bool]:
    """Whether each request has a penalty, read from the device once for each batch."""
    if not hasattr(asked, _PENALISED):
        terms = asked.presence_penalties, asked.frequency_penalties, asked.repetition_penalties - 1
        setattr(asked, _PENALISED, torch.stack(terms).ne(0).any(0).tolist())
    return getattr(asked, _PENALISED)  # type: ignore[no-any-return]


def sparing_generators(bookkeeping: Callable[..., Any]) -> Callable[..., Any]:
    """``bookkeeping`` of a model runner, which sees none of its batch's generators."""

    @functools.wraps(bookkeeping)
    def spared(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        real = batch.generators
        batch.generators = {}
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            batch.generators = real

    return spared


def leaving_budgets(sync: Callable[..., None]) -> Callable[..., None]:
    """A thinking budget's ``sync_batch`` that leaves none of one request to the next in its place.

    vLLM tells of a place that is filled by a move only that: who was there has ended.
    """

    @functools.wraps(sync)
    def synced(holder: Any, batch_update: Any) -> None:
        from vllm.v1.sample.logits_processor.interface import MoveDirectionality

        for _, place, direction in batch_update.moved if batch_update else ():
            if direction == MoveDirectionality.UNIDIRECTIONAL:
                holder._state.pop(place, None)
        sync(holder, batch_update)

    return synced


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
