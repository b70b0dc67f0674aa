"""The project's own recordings: its workloads, answered greedily by the embedded model, with what
the shipped drafter would have had accepted at each token. Made once, in the user's cache."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from pipelines.drafter.asks import LONGEST
from pipelines.drafter.compose import answers
from pipelines.drafter.lockstep import Llama
from pipelines.embedded import ensure_drafter, ensure_model
from pipelines.workloads import WORKLOADS, prompts

AT_ONCE: Final = 32
"""Answers written and kept together: what an interrupt loses."""
SEED: Final = 77


def record(folder: Path, count: int, workloads: Sequence[str] = WORKLOADS) -> None:
    """Append to a file of each of ``workloads`` in ``folder`` until it holds ``count`` recordings.

    Resumable; takes about two seconds a recording on two cores.

    Raises:
        ModelError: no drafter ships for the embedded model.
    """
    from transformers import AutoTokenizer

    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.recording import record as foreseen

    folder.mkdir(parents=True, exist_ok=True)
    target = ensure_model()
    tokenizer, model = AutoTokenizer.from_pretrained(target), Llama.load(target)
    engine = ReferenceEngine.load(target, ensure_drafter())
    with Progress() as progress:
        for workload in workloads:
            path = folder / f"{workload}.jsonl"
            have = _whole_lines(path)
            bar = progress.add_task(f"recording {workload}", total=count, completed=have)
            asked = itertools.islice(_asks(workload, tokenizer), have, count)
            while some := list(itertools.islice(asked, AT_ONCE)):
                lines: list[str] = []
                for shown, output in answers(model, tokenizer, some):
                    accepted = foreseen(engine, shown, output)
                    session = f"{workload}-{have + len(lines)}"
                    line = {"session": session, "prompt": shown, "output": output}
                    lines.append(json.dumps(line | {"model_accepted": accepted}) + "\n")
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(lines)
                have += len(some)
                progress.update(bar, completed=have)


def _asks(workload: str, tokenizer: Any) -> Iterator[list[int]]:
    for prompt in prompts(workload, "train", SEED):
        ids = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        if len(ids) <= LONGEST:
            yield ids


def _whole_lines(path: Path) -> int:
    """Lines of a file; one that was cut off at its end is removed."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.count(b"\n")
