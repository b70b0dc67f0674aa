"""Recordings of the embedded model's greedy answers, with the drafter's accepted length at every
position, for exact replay by any rule without a model.

Each prompt set becomes a trace file in the user's cache. Recorded prompts are not recorded again.
Ctrl-C loses at most ``AT_ONCE`` answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import TraceError
from learner.state_dir import lock
from pipelines import embedded, machine
from pipelines.lab.drafter.compose import FEW, load, write
from pipelines.lab.replay.traces import read
from pipelines.replay.engine import Trace
from pipelines.reports import Step, write_text

AT_ONCE: Final = 16  # answers generated and saved together

Ids = Sequence[int]
Sets = Mapping[str, Sequence[Ids]]  # prompts as token ids, at most :data:`PROMPT` each, by set


PROMPT: Final = 256
ANSWER: Final = 128  # most tokens of a prompt and of its answer, as in the documentation's figures


def folder_of() -> Path:
    """The folder of the recordings, named by lengths and drafter."""
    lengths = json.dumps([PROMPT, ANSWER])
    weights = embedded.DRAFTER / "model.safetensors"
    sha = hashlib.sha256(lengths.encode() + hashlib.sha256(weights.read_bytes()).digest())
    return machine.cache_directory() / "recordings" / sha.hexdigest()[:16]


def record(sets: Sets, step: Step) -> Path:
    """Record the prompts of ``sets`` that are missing; about two seconds each on two cores.

    Returns:
        the folder with the recordings.

    Raises:
        TraceError: another process is recording there.
    """
    folder = folder_of()
    try:
        with lock(folder):
            return _record(folder, sets, step)
    except BlockingIOError as error:
        raise TraceError(
            f"another hvd replay records in {folder}: run this again when that has ended."
        ) from error


def _record(folder: Path, sets: Sets, step: Step) -> Path:
    missing = {name: _missing(folder / f"{name}.jsonl", wanted) for name, wanted in sets.items()}
    whole, done = sum(map(len, missing.values())), 0
    if not whole:
        return folder
    from pipelines.lab.packed import pack
    from pipelines.lab.reference import load_engine

    target = embedded.ensure_model()
    model, end = load(target), embedded.load_tokenizer(None).eos_token_id
    engine = load_engine(target, embedded.DRAFTER)
    pack(engine)
    for name, left in missing.items():
        path = folder / f"{name}.jsonl"
        for begin in range(0, len(left), AT_ONCE):
            step(f"recording {name}", done, whole)
            lines = _lines_in(path)
            for line in _recorded(name, left[begin : begin + AT_ONCE], (model, engine), end):
                lines.append(line)
                done += 1
                step(f"recording {name}", done, whole)
            write_text("".join(f"{line}\n" for line in lines), path)
    return folder


def traces_of(folder: Path, name: str, wanted: Sequence[Ids]) -> list[Trace]:
    """The recordings of ``wanted`` prompts, in order, without empty answers.

    Raises:
        TraceError: the set was not recorded.
    """
    recorded = {tuple(trace.prompt): trace for trace in read(folder / f"{name}.jsonl", None).traces}
    return [recorded[prompt] for prompt in map(tuple, wanted) if prompt in recorded]


def _missing(path: Path, wanted: Sequence[Ids]) -> list[Ids]:
    known = {tuple(json.loads(line)["prompt"]) for line in _lines_in(path)}
    return [ids for ids in wanted if tuple(ids) not in known]


def _lines_in(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _recorded(name: str, some: Sequence[Ids], models: tuple[Any, Any], end: int) -> Iterator[str]:
    """Trace lines of the answers to ``some`` by the target and the drafts of the engine."""
    import torch

    from pipelines.lab.drafter.chains import record

    prompts, (model, engine) = [list(ids) for ids in some], models
    answers = write(model, prompts, torch.zeros(len(prompts)), end, ANSWER + 1)
    outputs = {place: text[len(prompts[place]) : -1] for place, text, _ in answers}
    for place, ids in enumerate(prompts):
        output = outputs[place] if len(outputs[place]) >= FEW else []
        line = {
            "session": f"{name}-{hashlib.sha256(repr(ids).encode()).hexdigest()[:12]}",
            "prompt": ids,
            "output": output,
            "max_tokens": ANSWER,
            "model_accepted": record(engine, ids, output),
        }
        yield json.dumps(line, separators=(",", ":"))
