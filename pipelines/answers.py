"""The target's greedy answers to asks of many kinds: what the first policy of a scope learns from.

The drafter has not read them (it learns from other asks), so what it drafts on them is what it
will draft in service.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.progress import Progress

from pipelines.drafter.asks import asks, turn
from pipelines.drafter.compose import Writer, write
from pipelines.drafter.lockstep import Llama

SEED: Final = 1000
"""Of the asks; those of the drafter's training have seeds of their own."""
POOL: Final = 64
"""Asks begun in order of length, and answers between two saves."""


def answer(model_path: Path, out: Path, count: int, seed: int = SEED) -> None:
    """Append greedy answers to ``out`` until it holds ``count``: a JSON object a line.

    Resumable: a later call goes on behind the last whole line. Answers that repeat themselves go on
    to their limit, as they do in service.
    """
    from transformers import AutoTokenizer

    out.parent.mkdir(parents=True, exist_ok=True)
    have = len(out.read_text().splitlines()) if out.exists() else 0
    tokenizer, model = AutoTokenizer.from_pretrained(model_path), Llama.load(model_path)
    _, bridge = turn(tokenizer)

    def stream() -> Iterator[Writer]:
        endless = asks(tokenizer, seed + have)
        while True:
            drawn = sorted(itertools.islice(endless, POOL), key=lambda a: len(a.tokens))
            for ask in drawn:
                writer = Writer.of(ask, 0.0)
                writer.may_loop = True
                yield writer

    with Progress() as progress, out.open("a") as file:
        bar = progress.add_task("answering", total=count, completed=have)
        finished = write(model, stream(), tokenizer.eos_token_id, bridge, layers=(0,))
        for tokens, prompt, *_ in itertools.islice(finished, max(count - have, 0)):
            file.write(json.dumps({"prompt": tokens[:prompt], "output": tokens[prompt:]}) + "\n")
            file.flush()
            progress.advance(bar)
