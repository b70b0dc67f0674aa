"""The project's own recordings: its workloads' prompts, answered by the embedded model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipelines.embedded import load_tokenizer
from pipelines.lab.replay import recording
from pipelines.progress import Step
from pipelines.workloads import WORKLOADS, prompts

PLAN: Final = recording.Plan(prompt=560, answer=160)
SEED: Final = 77


def folder() -> Path:
    """Where they are kept once they are made, a file of each workload.

    Raises:
        ModelError: no drafter ships for the embedded model.
    """
    return PLAN.folder()


def record(count: int, step: Step) -> Path:
    """The :func:`folder`, with ``count`` recordings of each workload at least.

    Takes about two seconds a recording on two cores.

    Raises:
        ModelError: no drafter ships for the embedded model.
    """
    tokenizer = load_tokenizer(None)
    asked = {name: list(itertools.islice(_asks(name, tokenizer), count)) for name in WORKLOADS}
    return recording.record(asked, PLAN, step)


def _asks(workload: str, tokenizer: Any) -> Iterator[list[int]]:
    seen = set[tuple[int, ...]]()
    for prompt in prompts(workload, "train", SEED):
        ids = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        if len(ids) <= PLAN.prompt and tuple(ids) not in seen:
            seen.add(tuple(ids))
            yield ids
