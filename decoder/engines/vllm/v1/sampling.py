"""Patches of vLLM's sampling, for 0.32 and 0.33, whose faults concern drafts or its CPU backend.

Each function replaces the one that vLLM looks up, with the same signature and the documented
meaning; plain greedy requests are not affected. Work beyond the argmax is done for the rows that
need it, a few at a time (``CHUNK_BYTES``), by vLLM's own functions; vLLM itself handles the bonus
rows, one a request as in plain decoding. One difference remains: a generator that cannot be rewound
advances, so a seeded request with chunked prefill draws other numbers than without. A request with
a thinking budget gets no drafts (``request_options``), and its thinking ends where it ends without.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from decoder.core.guards.draft_budget import COPIES, LOGITS_BYTES, tokens_of_logits

_PENALISED: Final = "_hvd_penalised"
_CERTAIN: Final = 1e9
"""vLLM's logit of a forced token."""
CHUNK_BYTES: Final = LOGITS_BYTES // COPIES
"""Memory for one chunk of rows: the share of one copy, since a chunk never coexists with the
probabilities of all rows."""
SORTED_ROW_COPIES: Final = 6
"""Copies of its logits that a row needs while its tokens are counted or sorted."""


def patch_sampling() -> None:
    """Replace the functions that are no methods; ``AROUND`` has the others. Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    sampler: Any = rejection_sampler.RejectionSampler
    sampler.apply_penalties = staticmethod(apply_penalties)
    sampler._combine_outputs_with_spec_tokens = staticmethod(
        lambda outputs, drafts=None: outputs if drafts is None else TokensBefore(outputs, drafts)
    )
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.apply_top_k_top_p = partial(only_where_asked, apply_top_k_top_p)


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value once for each of its tokens, with one value replaced by another.

    vLLM's kernel gets a converted copy of the output on a CPU, which is never copied back: it
    returns uninitialised memory as temperatures. ``cu_num_tokens`` counts the tokens of all
    requests up to and including each.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)


def only_where_asked(
    apply: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    *more: Any,
) -> torch.Tensor:
    """vLLM's ``apply_top_k_top_p`` for the rows that set one of both, in chunks. Mutates
    ``logits``; other rows keep tokens of probability 0, which vLLM would mask.

    On a CPU vLLM's fails on no rows, as in a prefill, and sorts every row where one sets ``top_p``.
    """
    vocabulary = logits.shape[-1]
    limited = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if k is not None:
        limited |= k < vocabulary
    if p is not None:
        limited |= p < 1
    for rows in (
        limited.nonzero()
        .flatten()
        .split(tokens_of_logits(vocabulary, CHUNK_BYTES, SORTED_ROW_COPIES))
    ):
        if len(rows):
            own = (None if limit is None else limit[rows] for limit in (k, p))
            logits[rows] = apply(logits[rows], *own, *more)
    return logits


def in_chunks(
    get: Callable[..., Any], sampler: Any, count: int, metadata: Any, *tensors: torch.Tensor
) -> Any:
    """A rejection sampler's ``_get_logprobs_tensors``, in chunks and without padding.

    vLLM pads every request to the step's longest draft, and copies that twice: 8.5 GB for one
    request for log probabilities among 128, one of which verifies 64 tokens of 128K entries.

    Args:
        tensors: logits, those of drafts, those of bonus tokens, and token ids [requests, longest
            draft + 1]; the result has a row for each of these ids. Rows after a request's bonus
            token are undefined.
    """
    from vllm.utils.torch_utils import async_tensor_h2d

    logits, target, bonus, ids = tensors
    size, width = tokens_of_logits(logits.shape[-1], CHUNK_BYTES, COPIES), ids.shape[1]
    if ids.numel() <= size:
        return get(sampler, count, metadata, *tensors)
    lengths = [drafted + 1 for drafted in metadata.num_draft_tokens]
    ends = list(accumulate(lengths))
    real = [i * width + j for i, n in enumerate(lengths) for j in range(n)]
    rows = async_tensor_h2d(real, ids.device, torch.int64)
    tokens = ids.flatten()[rows].unsqueeze(1)
    chunks = []
    for begin in range(0, len(logits), size):
        end = min(begin + size, len(logits))
        own, drafted, behind = _chunk_of(metadata, ends, begin, end)
        part = logits[begin:end], target[drafted], bonus[behind], tokens[begin:end]
        chunks.append(get(sampler, count, own, *part))
    padded = []
    for parts in zip(*(chunk[:3] for chunk in chunks), strict=True):
        joined = torch.cat(parts)
        empty = joined.new_zeros((ids.numel(), *joined.shape[1:]))
        padded.append(empty.index_copy_(0, rows, joined))
    return type(chunks[-1])(*padded)


def _chunk_of(metadata: Any, ends: Sequence[int], begin: int, end: int) -> tuple[Any, slice, slice]:
    """Metadata of the rows from ``begin`` to ``end``, as if each were a request of one token; and
    the slices of these rows among those of drafts and of bonus tokens. ``ends`` are the numbers of
    rows up to and including each request's bonus token."""
    first, last = bisect_right(ends, begin), bisect_right(ends, end)
    drafted, behind = slice(begin - first, end - last), slice(first, last)
    device = metadata.target_logits_indices.device
    own = dataclasses.replace(
        metadata,
        cu_num_sampled_tokens=torch.arange(1, end - begin + 1, device=device),
        target_logits_indices=metadata.target_logits_indices[drafted] - begin,
        bonus_logits_indices=metadata.bonus_logits_indices[behind] - begin,
    )
    return own, drafted, behind


class TokensBefore(Sequence[list[int]]):
    """The tokens before each drafted token, a list a row, built on access."""

    def __init__(self, outputs: list[list[int]], drafts: list[list[int]]) -> None:
        """Keep references to both, one entry for each request."""
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
    """A rejection sampler's ``apply_penalties``, in chunks, for rows of penalised requests alone:
    vLLM counts the vocabulary for each row of every request, 8.4 times the memory of the logits.

    Args:
        logits: float32 (drafted tokens, vocabulary); modified and returned.
        sampling_metadata: the requests' sampling options; caches which requests have a penalty.
        metadata: of the drafts, with their lengths.
    """
    if sampling_metadata.no_penalties:
        return logits
    penalised, end = _penalised(sampling_metadata), 0
    for request, count in enumerate(metadata.num_draft_tokens):
        begin, end = end, end + count
        if count and penalised[request]:
            _penalise(logits[begin:end], sampling_metadata, request)
    return logits


def _penalise(logits: torch.Tensor, options: Any, request: int) -> None:
    """Apply one request's penalties to the rows of its draft, float32 (tokens, vocabulary).

    The request's output is counted once; each row adds its draft up to there. Mutates ``logits``.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.utils import get_token_bin_counts_and_mask
    from vllm.utils.torch_utils import async_tensor_h2d

    device, (count, vocabulary) = logits.device, logits.shape
    own = slice(request, request + 1)
    output = options.output_token_ids[request]
    tokens = [*output, *options.spec_token_ids[request]]
    known = async_tensor_h2d(tokens, device, torch.int64).unsqueeze(0)
    known.masked_fill_(known == -1, vocabulary)  # a slot without a token yet
    text, draft = known[:, : len(output)], known[:, len(output) :]
    prompt = options.prompt_token_ids[own]
    _, prompted = get_token_bin_counts_and_mask(prompt, vocabulary, 1)
    counts = get_token_bin_counts_and_mask(text, vocabulary, 1)[0].int()
    offsets = torch.arange(count, device=device)
    size = tokens_of_logits(vocabulary, CHUNK_BYTES, SORTED_ROW_COPIES)
    for first in range(0, count, size):
        rows = logits[first : first + size]
        n = len(rows)
        before = (offsets < offsets[first:][:n].unsqueeze(1)) & (draft < vocabulary)
        drafted = draft.clamp(max=vocabulary - 1).expand(n, -1)
        seen = counts.repeat(n, 1).scatter_add_(1, drafted, before.int())
        is_seen = seen > 0
        _custom_ops.apply_repetition_penalties(
            rows, prompted.repeat(n, 1), is_seen, options.repetition_penalties[own].repeat(n)
        )
        rows -= options.frequency_penalties[own].unsqueeze(1) * seen
        rows -= options.presence_penalties[own].unsqueeze(1) * is_seen


def _penalised(options: Any) -> list[bool]:
    """Whether each request has a penalty, read from the device once for each batch."""
    if not hasattr(options, _PENALISED):
        repetition = options.repetition_penalties - 1
        terms = options.presence_penalties, options.frequency_penalties, repetition
        setattr(options, _PENALISED, torch.stack(terms).ne(0).any(0).tolist())
    return getattr(options, _PENALISED)  # type: ignore[no-any-return]


def without_generators(
    bookkeeping: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
) -> Any:
    """A model runner's ``_bookkeeping_sync``, on a CPU without its batch's generators: it rewinds
    them during chunked prefill, but a CPU generator has no offset, and the engine ends."""
    batch, generators = runner.input_batch, runner.input_batch.generators
    if runner.device.type == "cpu":
        batch.generators = {}
    try:
        return bookkeeping(runner, *args, **kwargs)
    finally:
        batch.generators = generators


def clearing_moved_rows(sync: Callable[..., None], holder: Any, batch_update: Any) -> None:
    """A thinking budget's ``sync_batch`` that clears a row before another request moves into it:
    else the budget of the request that ended there would apply to it."""
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality

    for _, row, direction in batch_update.moved if batch_update else ():
        if direction == MoveDirectionality.UNIDIRECTIONAL:
            holder._state.pop(row, None)
    sync(holder, batch_update)


def without_drafts(
    update: Callable[..., None],
    holder: Any,
    output_token_ids: Any,
    spec_token_ids: Any,
    repeat_indices: Any = None,
) -> None:
    """A thinking budget's ``update_state`` without drafts, and without the empty slots reserved for
    them, which vLLM counts as tokens when a request returns after others."""
    update(holder, output_token_ids, None, repeat_indices)


def end_thinking(
    _: Callable[..., torch.Tensor],
    holder: Any,
    logits: torch.Tensor,
    predict_bonus_token: bool,
    spec_token_ids: list[list[int]],
) -> torch.Tensor:
    """A thinking budget's ``apply_to_logits``: force the end of thinking as the next token of each
    request whose budget is used up. ``logits`` are [requests, vocabulary] with
    ``predict_bonus_token``, else [tokens of drafts, vocabulary]; changed in place."""
    drafts, ends = [len(tokens) for tokens in spec_token_ids], holder.think_end_token_ids
    for row, state in holder._state.items():
        if bool(drafts[row]) == predict_bonus_token:
            continue  # the other call has the logits of its next token
        if state["in_end"] and state["force_index"] and state["end_count"] < len(ends):
            at = row if predict_bonus_token else sum(drafts[:row])
            logits[at, ends[state["end_count"]]] = _CERTAIN
    return logits


AROUND: Final[dict[str, Callable[..., Any]]] = {
    "_get_logprobs_tensors": in_chunks,
    "_bookkeeping_sync": without_generators,
    "sync_batch": clearing_moved_rows,
    "update_state": without_drafts,
    "apply_to_logits": end_thinking,
}
"""Wrappers by the name of the wrapped method."""
