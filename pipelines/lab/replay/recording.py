"""Recordings of the embedded model's greedy answers to prompts, with the drafter's chain at every
position: what any rule would have made of them can then be replayed, exactly and without a model.

Each prompt set becomes a file of trace lines (``traces``). They are kept in the user's cache, and
what is there is not recorded again, whatever else is asked for; Ctrl-C loses what is under way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from decoder.contracts.errors import ModelError
from decoder.policy.pricing import CostTable
from pipelines import machine
from pipelines.embedded import ensure_drafter, ensure_model
from pipelines.lab.drafter.compose import FEW, load, write
from pipelines.lab.replay.traces import Trace, read
from pipelines.progress import Step
from pipelines.reports import atomic_write

AT_ONCE: Final = 16
"""Answers written and kept together: what an interrupt loses."""
PROFILED: Final = 30.0
"""Seconds for timing steps: more than a worker takes at its start, since nobody waits for it."""
LARGE: Final = 32
"""Tokens of a step that must have been timed: without, every draft would seem to cost nothing."""

Ids = Sequence[int]
Sets = Mapping[str, Sequence[Ids]]
"""Prompts, as token ids that fit the plan, by the name of their set."""


@dataclass(frozen=True)
class Plan:
    """What to record: prompts of ``prompt`` tokens and ``answer`` tokens of each answer at most, by
    default as in the figures of the project's documents."""

    prompt: int = 256
    answer: int = 128

    def folder(self) -> Path:
        """Where recordings are kept: named by lengths and drafter."""
        told = json.dumps([self.prompt, self.answer])
        weights = ensure_drafter() / "model.safetensors"
        sha = hashlib.sha256(told.encode() + hashlib.sha256(weights.read_bytes()).digest())
        return machine.cache_directory() / "recordings" / sha.hexdigest()[:16]


def record(sets: Sets, plan: Plan, step: Step) -> Path:
    """The folder that holds recordings of ``sets``, made as far as they are not there yet.

    Raises:
        ModelError: no drafter ships for the embedded model.
    """
    folder = plan.folder()
    folder.mkdir(parents=True, exist_ok=True)
    left = {n: _missing(folder, n, asked) for n, asked in sets.items()}
    if any(left.values()):
        _Recorder(plan, folder).run(left, step)
    return folder


def traces_of(folder: Path, name: str, asked: Sequence[Ids]) -> list[Trace]:
    """The recordings of a set's prompts, in their order, without those of an empty answer.

    Raises:
        TraceError: the set was not recorded.
    """
    held = {tuple(trace.prompt): trace for trace in read(folder / f"{name}.jsonl", None).traces}
    return [held[prompt] for prompt in map(tuple, asked) if prompt in held]


def _missing(folder: Path, name: str, asked: Sequence[Ids]) -> list[Ids]:
    lines = _lines_in(folder / f"{name}.jsonl")
    known = {tuple(json.loads(line)["prompt"]) for line in lines}
    return [ids for ids in asked if tuple(ids) not in known]


def _lines_in(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def costs_of(folder: Path, step: Step) -> CostTable:
    """The costs of this machine in microseconds, measured once and kept in ``folder``.

    Raises:
        ModelError: the machine is too busy to time the large steps.
    """
    path = _costs_in(folder)
    if not path.exists():
        step("timing the engine", 0, 1)
        keep(_measured(), folder)
    held = json.loads(path.read_text(encoding="utf-8"))
    lists = {name: tuple(v) for name, v in held.items() if isinstance(v, list)}
    return CostTable(**{**held, **lists})


def keep(table: CostTable, folder: Path) -> None:
    """Keep ``table`` as the costs of the recordings in ``folder``.

    Raises:
        ModelError: it knows no large steps.
    """
    if table.tokens[-1] < LARGE:
        raise ModelError(
            "this machine was too busy to time its steps: run it again when it is quiet, or with "
            "--nominal."
        )
    told = {name: value for name, value in asdict(table).items() if name != "dense"}
    _write(_costs_in(folder), json.dumps(told))


def _costs_in(folder: Path) -> Path:
    """Named by the machine: a cache may be carried to another, or a run held to fewer flags."""
    of = hashlib.sha256(machine.description().encode()).hexdigest()[:16]
    return folder / f"costs-{of}.json"


def _measured() -> CostTable:
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.method import method
    from decoder.engines.reference.profile import profile

    engine = ReferenceEngine.load(ensure_model(), ensure_drafter())
    return profile(engine, method("eagle3"), PROFILED)


def _write(path: Path, text: str) -> None:
    atomic_write(path, lambda part: part.write_text(text, encoding="utf-8"))


class _Recorder:
    def __init__(self, plan: Plan, folder: Path) -> None:
        from transformers import AutoTokenizer

        from decoder.engines.reference.engine import ReferenceEngine

        self._plan, self._folder, target = plan, folder, ensure_model()
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._model = load(target)
        self._engine = ReferenceEngine.load(target, ensure_drafter())

    def run(self, sets: Sets, step: Step) -> None:
        """Record ``sets``, some prompts at a time."""
        whole, done = sum(map(len, sets.values())), 0
        for name, asked in sets.items():
            path = self._folder / f"{name}.jsonl"
            lines = _lines_in(path)
            for begin in range(0, len(asked), AT_ONCE):
                some = asked[begin : begin + AT_ONCE]
                step(f"recording {name}", done, whole)
                for line in self._recorded(name, some):
                    lines.append(line)
                    done += 1
                    step(f"recording {name}", done, whole)
                _write(path, "".join(f"{line}\n" for line in lines))

    def _recorded(self, name: str, asked: Sequence[Ids]) -> Iterator[str]:
        import torch

        from decoder.engines.reference import recording

        shown = [list(ids) for ids in asked]
        greedy, end = torch.zeros(len(shown)), self._tokenizer.eos_token_id
        made = dict[int, list[int]]()
        for place, text, _ in write(self._model, shown, greedy, end, self._plan.answer + 1):
            output = text[len(shown[place]) : -1]
            made[place] = output if len(output) >= FEW else []
        for place, ids in enumerate(shown):
            output = made[place]
            line = {
                "session": f"{name}-{hashlib.sha256(repr(ids).encode()).hexdigest()[:12]}",
                "prompt": ids,
                "output": output,
                "max_tokens": self._plan.answer,
                "model_accepted": recording.record(self._engine, ids, output),
            }
            yield json.dumps(line, separators=(",", ":"))
