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

from pipelines.drafter.asks import Ask, asks, turn
from pipelines.drafter.compose import Writer, write
from pipelines.drafter.lockstep import Llama

SEED: Final = 1000
"""Of the asks; those of the drafter's training have seeds of their own."""
POOL: Final = 64
"""Asks drawn at once."""


def answer(model_path: Path, out: Path, count: int, seed: int = SEED) -> None:
    """Append greedy answers to ``out`` until it holds ``count``: a JSON object a line.

    Resumable: a later call goes on behind the last whole line, with other asks. Answers that repeat
    themselves go on to their limit, as they do in service.
    """
    from transformers import AutoTokenizer

    out.parent.mkdir(parents=True, exist_ok=True)
    have = whole_lines(out)
    if have >= count:
        return
    tokenizer, model = AutoTokenizer.from_pretrained(model_path), Llama.load(model_path)
    _, bridge = turn(tokenizer)
    drawn = greedy_writers(asks(tokenizer, seed + have))
    with Progress() as progress, out.open("a") as file:
        bar = progress.add_task("answering", total=count, completed=have)
        finished = write(model, drawn, tokenizer.eos_token_id, bridge, layers=(0,))
        for tokens, prompt, *_ in itertools.islice(finished, count - have):
            file.write(json.dumps({"prompt": tokens[:prompt], "output": tokens[prompt:]}) + "\n")
            file.flush()
            progress.advance(bar)


def greedy_writers(endless: Iterator[Ask]) -> Iterator[Writer]:
    """A writer for each ask; neighbours are of like length, since a step costs what its longest
    slot does."""
    while drawn := list(itertools.islice(endless, POOL)):
        for ask in sorted(drawn, key=lambda a: len(a.tokens)):
            writer = Writer.of(ask, 0.0)
            writer.may_loop = True
            yield writer


def whole_lines(path: Path) -> int:
    """Lines of a file; one that was cut off at its end is removed."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.count(b"\n")
