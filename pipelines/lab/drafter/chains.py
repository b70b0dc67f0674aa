"""What the model arm would have done at every position of a finished output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from decoder.contracts.errors import EngineError
from decoder.engines.reference.engine import ReferenceEngine
from pipelines.lab.drafter.head import KV, Eagle3Head
from pipelines.replay.cache_drafts import common_prefix

ROWS: Final = 512
"""Chains run together: their attention scores over 16k positions stay below a gigabyte."""


@torch.inference_mode()
def chains(
    head: Eagle3Head, embedding: nn.Module, tokens: Tensor, aux: Tensor, rows: Tensor, k: int
) -> Tensor:
    """The greedy chains of ``k`` tokens from ``rows`` of a known text: target ids, int64 (rows, k).

    Each attends to the positions committed before it started and to its own steps, as in serving.

    Args:
        embedding: the target's, ids -> (tokens, hidden).
        tokens: int64 (n,) the text.
        aux: (n - 1 or more, layers * hidden) the target's states at its positions.
        rows: int64; a chain at row ``p`` knows ``tokens[: p + 2]`` and drafts what follows.
    """
    followers = embedding(tokens[1:])
    states = head.fc(aux[: len(followers)])
    places = torch.arange(len(followers), device=tokens.device)
    committed = head.midlayer.self_attn.keys_values(head.midlayer.mixed(followers, states), places)
    parts = []
    for starts in rows.split(ROWS):
        before = int(starts.max())
        cache = KV(committed.keys[:, :before], committed.values[:, :before])
        visible = places[:before] < starts[:, None]
        own = torch.eye(len(starts), dtype=torch.bool, device=tokens.device)
        embeds, hidden, drafted = followers[starts], states[starts], list[Tensor]()
        for step in range(k):
            visible = torch.cat((visible, own), 1)
            hidden, cache = head.advance(embeds, hidden, starts + step, cache, visible)
            best = head.logits(hidden).argmax(-1)
            drafted.append(best + head.d2t[best])
            embeds = embedding(drafted[-1])
        parts.append(torch.stack(drafted, 1))
    return torch.cat(parts)


def record(engine: ReferenceEngine, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What the model arm would have had accepted at every position of a greedy ``output``.

    Entry ``p`` is the accepted length of the drafter's chain in the state in which ``output[:p]``
    is committed, its tokens compared with ``output[p:]``; 0 where the drafter knows nothing. A
    request near its limit verifies fewer: there, take the smaller of this and its room. One
    batched, teacher-forced pass.

    Raises:
        EngineError: there is no drafter, or prompt and output do not fit the context.
    """
    if engine.head is None:
        raise EngineError("recording a model arm needs a drafter: load one.")
    text = [*prompt, *output]
    if not prompt or len(text) > engine.max_model_len:
        raise EngineError(
            f"a prompt of {len(prompt)} tokens with {len(output)} of output cannot be recorded in "
            f"a context of {engine.max_model_len}."
        )
    # A prompt of one token leaves the head nothing to read before the first output token.
    unknown = 1 if len(prompt) == 1 else 0
    if len(output) <= unknown:
        return [0] * len(output)
    with torch.inference_mode():
        aux = engine.target.run(text[:-1], last=True).aux
        assert aux is not None, "there is a drafter"
        tokens = torch.tensor(text, device=aux.device)
        rows = torch.arange(len(prompt) - 2 + unknown, len(text) - 2, device=aux.device)
        k = engine.settings.model_draft_tokens
        found = chains(engine.head, engine.target.embedding, tokens, aux, rows, k).tolist()
    drafts = [[]] * unknown + found
    return [common_prefix(draft, output[p : p + len(draft)]) for p, draft in enumerate(drafts)]
