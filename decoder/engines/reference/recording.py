"""What the model arm would have done at every position of a finished output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoder.contracts.errors import EngineError
from decoder.drafting.drafts import common_prefix
from decoder.drafting.eagle3_teacher import chains
from decoder.engines.reference.engine import ReferenceEngine


def record(engine: ReferenceEngine, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What the model arm would have had accepted at every position of a greedy ``output``.

    Entry ``p`` is the accepted length of the drafter's chain in the state in which ``output[:p]``
    is committed, its tokens compared with ``output[p:]``. A request near its limit verifies fewer:
    there, take the smaller of this and its room.

    Raises:
        EngineError: there is no drafter, or prompt and output do not fit the context.
    """
    return accepted(record_chains(engine, prompt, output), output)


def accepted(drafts: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """Accepted length of the draft at each position of ``output``."""
    return [common_prefix(draft, output[p : p + len(draft)]) for p, draft in enumerate(drafts)]


def record_chains(
    engine: ReferenceEngine, prompt: Sequence[int], output: Sequence[int]
) -> list[list[int]]:
    """The drafter's chain at every position of ``output``, in the same states.

    A position at which the drafter knows nothing has an empty one. One batched, teacher-forced
    pass.

    Raises:
        EngineError: as :func:`record`.
    """
    if engine.head is None:
        raise EngineError("recording a model arm needs a drafter: load one.")
    text = [*prompt, *output]
    if not prompt or len(text) > engine.max_model_len:
        raise EngineError(
            f"a prompt of {len(prompt)} tokens with {len(output)} of output cannot be recorded in "
            f"a context of {engine.max_model_len}."
        )
    if not output:
        return []
    # A prompt of one token leaves the head nothing to read before the first output token.
    unknown = 1 if len(prompt) == 1 else 0
    if len(text) - 1 <= unknown:
        return [[] for _ in output]
    with torch.inference_mode():
        aux = engine.target.listen(text[:-1])
        tokens = torch.tensor(text, device=aux.device)
        rows = torch.arange(len(prompt) - 2 + unknown, len(text) - 2, device=aux.device)
        k = engine.settings.model_draft_tokens
        found: list[list[int]] = chains(
            engine.head, engine.target.embedding, tokens, aux, rows, k
        ).tolist()
    return [[] for _ in range(unknown)] + found
