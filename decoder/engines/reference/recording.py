"""What the model arm would have done at every position of a finished output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoder.contracts.errors import EngineError
from decoder.drafting.drafts import common_prefix
from decoder.drafting.eagle3 import chains
from decoder.engines.reference.engine import ReferenceEngine


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
        aux = engine.target.listen(text[:-1])
        tokens = torch.tensor(text, device=aux.device)
        rows = torch.arange(len(prompt) - 2 + unknown, len(text) - 2, device=aux.device)
        k = engine.settings.model_draft_tokens
        found = chains(engine.head, engine.target.embedding, tokens, aux, rows, k).tolist()
    drafts = [[]] * unknown + found
    return [common_prefix(draft, output[p : p + len(draft)]) for p, draft in enumerate(drafts)]
