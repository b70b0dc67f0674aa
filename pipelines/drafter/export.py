"""Step 4: the checkpoint directory that is shipped: weights, configuration, model card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from decoder.drafting.eagle3 import WEIGHTS, Eagle3Head, save_head
from pipelines.drafter.acceptance import DRAFTED, Acceptance
from pipelines.drafter.run import Settings

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags: [eagle3, speculative-decoding]
---
# EAGLE3 head for SmolLM2-135M-Instruct

A one-layer drafter (EAGLE-3, arXiv 2503.01840) in the layout that vLLM 0.32 loads with
`{{"method": "eagle3", "model": "<this directory>"}}`: `fc`, `midlayer.*`, `norm`, `lm_head` over
{vocabulary} draft tokens, `d2t`, `t2d`, {megabytes:.1f} MB in bf16. The embeddings are the target's
and are not stored.

## How it was made

1. Conversations, {tokens} tokens, {answers} of them in answers ({sources}). `composed`: the target
   answers this project's own prompts (made from Python's standard library and fixed topic lists,
   `train` side of the split), other tasks made from the same sources (`asks.py`: SQL over random
   schemas, summaries, files, JSON, function calls, code from tests), instructions that it wrote
   itself and questions about documents that it wrote itself; some go on for a turn or two;
   two thirds of the answers greedy, the others at temperature 0.7; its hidden states are kept as it
   writes. `written`: functions and documentation of Python's standard library (PSF licence) in the
   place of answers. Aux layers {layers} (as vLLM counts).
2. `copying.py`: one query head of each group starts as a matcher that finds the earlier occurrence
   of the newest token, so that the head can copy what followed it.
3. `train.py`: {batches} batches, {rows} chains, soft labels, on a CPU:
{runs}

No public prompt set or benchmark went in.

## Measured

On {cycles} simulated greedy cycles of {drafted} drafts over held-out conversations of that kind:
**{accepted:.2f} accepted tokens a cycle**; acceptance by place, given the ones before: {by_step}.

`pipelines/drafter/measure.py` measures it in an unmodified vLLM.

## Licence

Apache-2.0, as its target.
"""


@dataclass(frozen=True)
class Provenance:
    """What the head had seen when it was written."""

    sources: dict[str, int]
    """Conversations by origin."""
    tokens: int
    answers: int
    batches: int
    rows: int
    runs: tuple[Settings, ...]


def _spelled(settings: Settings) -> str:
    return ", ".join(f"{k}={v}" for k, v in asdict(settings).items())


def export(head: Eagle3Head, path: Path, made: Provenance, found: Acceptance) -> None:
    """Write the checkpoint directory; ``head`` takes the target's states as they are."""
    save_head(head, path)
    card = CARD.format(
        vocabulary=head.config.draft_vocab_size,
        megabytes=(path / WEIGHTS).stat().st_size / 1e6,
        layers=list(head.config.aux_layers),
        sources=", ".join(f"{n} {origin}" for origin, n in made.sources.items()),
        tokens=made.tokens,
        answers=made.answers,
        batches=made.batches,
        rows=made.rows,
        runs="\n".join(f"   - `{_spelled(r)}`" for r in made.runs),
        cycles=found.cycles,
        drafted=DRAFTED,
        accepted=found.accepted,
        by_step=", ".join(f"{a:.2f}" for a in found.by_step),
    )
    (path / "README.md").write_text(card)
