"""What a head learns from: conversations put end to end, and the tokens that it may draft."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pipelines.drafter.shards import Sequence
from pipelines.drafter.unroll import Pack

PROMPT_WEIGHT, SOFT_POSITIONS = 0.2, 7000


def draft_vocabulary(sequences: list[Sequence], size: int, embedding: Tensor) -> Tensor:
    """The ``size`` tokens most frequent in answers, as far as ``sequences`` tell: ascending ids.

    To what the answers hold is added what the target expected there: its probabilities at about
    :data:`SOFT_POSITIONS` random answer positions, scaled up, which know of tokens that few answers
    happen to hold. Prompts count a little. Ties go to the lowest ids: a BPE tokenizer numbers its
    merges by frequency.
    """
    held = torch.zeros(len(embedding))
    expected = torch.zeros(len(embedding))
    each = -(-SOFT_POSITIONS // len(sequences))
    for s in sequences:
        answer = s.tokens[s.prompt :]
        held += torch.bincount(answer, minlength=len(held))
        held += PROMPT_WEIGHT * torch.bincount(s.tokens[: s.prompt], minlength=len(held))
        chosen = s.prompt - 1 + torch.randperm(len(answer))[:each]
        logits = s.final[chosen].float() @ embedding.T
        expected += logits.softmax(-1).sum(0) * len(answer) / max(1, len(chosen))
    order = torch.sort(held + expected, descending=True, stable=True).indices
    return order[:size].sort().values


def pack(sequences: list[Sequence], embedding: Tensor, scale: Tensor) -> Pack:
    """Put ``sequences`` end to end; ``scale`` (layers * hidden) divides the aux states."""
    ends = torch.tensor([len(s.tokens) for s in sequences]).cumsum(0).tolist()
    tokens = torch.cat([s.tokens for s in sequences])
    return Pack(
        tokens,
        functional.embedding(tokens, embedding),
        torch.cat([s.aux for s in sequences]).float() / scale,
        torch.cat([s.final for s in sequences]).float(),
        tuple(zip([0, *ends[:-1]], ends, strict=True)),
    )


def chain_rows(sequences: list[Sequence], prompt_share: float) -> Tensor:
    """Rows of their pack at which chains start: every one whose draft is for the answer, and a
    random ``prompt_share`` of the others.
    """
    wanted = []
    for s in sequences:
        chosen = torch.rand(len(s.tokens)) < prompt_share
        chosen[s.prompt - 1 :] = True
        chosen[0] = chosen[-1] = False  # the first state is like no other, the last has no next
        wanted.append(chosen)
    return torch.cat(wanted).nonzero()[:, 0]
