"""The checkpoint directory that is shipped: weights, configuration, model card."""

from __future__ import annotations

import copy
from pathlib import Path

from decoder.drafting.eagle3 import WEIGHTS, save_head
from pipelines.lab.drafter.shards import Conversations
from pipelines.lab.drafter.train import DRAFTED, Acceptance, Run, Settings
from pipelines.reports import atomic_write

CARD = Path(__file__).with_name("card.md")


def export(
    run: Run, path: Path, settings: Settings, there: Conversations, found: Acceptance
) -> None:
    """Write the head of ``run`` and its card, which tells what it was made from."""
    head = copy.deepcopy(run.head)
    head.fc.weight.data.div_(run.scale)  # the head that ships takes the target's states as they are
    save_head(head, path)
    card = CARD.read_text(encoding="utf-8").format(
        run=run,
        megabytes=(path / WEIGHTS).stat().st_size / 1e6,
        conversations=len(there),
        tokens=sum(len(c.tokens) for c in there),
        answers=sum(c.answer for c in there),
        settings=settings,
        found=found,
        drafted=DRAFTED,
        by_step=", ".join(f"{a:.2f}" for a in found.by_step),
    )
    atomic_write(path / "README.md", lambda part: part.write_text(card, encoding="utf-8"))
