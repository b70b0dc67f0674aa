"""Recordings of the embedded model's greedy answers to prompts, with the drafter's chain at every
position: what any rule would have made of them can then be replayed, exactly and without a model.

Each prompt set becomes a file of trace lines (``traces``) that also hold ``model_drafts``, the
tokens of each position's chain. They are kept in the user's cache; Ctrl-C loses what is under way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from decoder.contracts.errors import ModelError
from decoder.policy.pricing import CostTable
from pipelines import machine
from pipelines.drafter.compose import LENGTH, LONGEST_ANSWER, answers
from pipelines.drafter.lockstep import Llama
from pipelines.drafter.measure import Messages
from pipelines.embedded import ensure_drafter, ensure_model
from pipelines.settled import settle

AT_ONCE: Final = 16
"""Answers written and kept together: what an interrupt loses."""
COSTS: Final = "costs.json"
"""What the reference engine's cycles took on the machine that recorded."""

Step = Callable[[str, int, int], None]
Sets = Mapping[str, Sequence[Messages]]
"""Prompts by the name of their set."""


@dataclass(frozen=True)
class Plan:
    """What to record: prompts cut in their middle to ``prompt`` tokens, and ``answer`` tokens of
    each answer at most."""

    prompt: int = 512
    answer: int = 128

    def folder(self, sets: Sets) -> Path:
        """Where these recordings are kept: named by prompts, lengths and drafter."""
        told = json.dumps([self.prompt, self.answer, dict(sets)], default=list)
        weights = ensure_drafter() / "model.safetensors"
        sha = hashlib.sha256(told.encode() + hashlib.sha256(weights.read_bytes()).digest())
        return machine.cache_directory() / "recordings" / sha.hexdigest()[:16]


def record(sets: Sets, plan: Plan, step: Step) -> Path:
    """The folder that holds recordings of ``sets``, made as far as they are not there yet.

    Raises:
        ModelError: the plan's lengths do not fit, or no drafter ships for the embedded model.
    """
    if plan.answer > LONGEST_ANSWER or plan.prompt + plan.answer >= LENGTH:
        raise ModelError(
            f"prompts of {plan.prompt} and answers of {plan.answer} tokens cannot be recorded: ask "
            f"for at most {LONGEST_ANSWER} of an answer and {LENGTH - 1} together."
        )
    folder = plan.folder(sets)
    folder.mkdir(parents=True, exist_ok=True)
    left = {n: s for n, s in sets.items() if not (folder / f"{n}.jsonl").exists()}
    if left or not (folder / COSTS).exists():
        _Recorder(plan, folder).run(left, step)
    return folder


def costs_of(folder: Path) -> CostTable:
    """The cost table measured when ``folder`` was recorded, in microseconds."""
    held = json.loads((folder / COSTS).read_text(encoding="utf-8"))
    lists = {name: tuple(v) for name, v in held.items() if isinstance(v, list)}
    return CostTable(**{**held, **lists})


class _Recorder:
    def __init__(self, plan: Plan, folder: Path) -> None:
        from transformers import AutoTokenizer

        from decoder.engines.reference.engine import ReferenceEngine

        self._plan, self._folder, target = plan, folder, ensure_model()
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._model = Llama.load(target)
        self._engine = ReferenceEngine.load(target, ensure_drafter())

    def run(self, sets: Sets, step: Step) -> None:
        """Record ``sets``; each file appears whole. Profile the engine if nobody has."""
        if not (self._folder / COSTS).exists():
            self._profile()
        for done, (name, asked) in enumerate(sets.items()):
            step(f"recording {name}", done, len(sets))
            self._put(f"{name}.jsonl", "".join(self._lines(name, asked)))

    def _lines(self, name: str, asked: Sequence[Messages]) -> list[str]:
        from decoder.engines.reference.recording import accepted, record_chains

        lines = []
        for begin in range(0, len(asked), AT_ONCE):
            some = [self._ids(messages) for messages in asked[begin : begin + AT_ONCE]]
            made = answers(self._model, self._tokenizer, some)
            for shown, answer in sorted(made, key=lambda pair: some.index(pair[0])):
                output = answer[: self._plan.answer]
                drafts = record_chains(self._engine, shown, output)
                digest = hashlib.sha256(repr(shown).encode()).hexdigest()
                line = {
                    "session": f"{name}-{digest[:8]}",
                    "prompt": shown,
                    "output": output,
                    "max_tokens": self._plan.answer,
                    "model_accepted": accepted(drafts, output),
                    "model_drafts": drafts,
                }
                lines.append(json.dumps(line, separators=(",", ":")) + "\n")
        return lines

    def _ids(self, messages: Messages) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        room = self._plan.prompt
        # Out of the middle: the instruction and the end of the template stay.
        return ids if len(ids) <= room else ids[: room // 2] + ids[len(ids) - (room - room // 2) :]

    def _profile(self) -> None:
        from decoder.engines.reference.method import method
        from decoder.engines.reference.profile import profile

        table = asdict(profile(self._engine, method("eagle3")))
        del table["dense"]
        self._put(COSTS, json.dumps(table))

    def _put(self, name: str, text: str) -> None:
        settle(self._folder / name, lambda part: part.write_text(text, encoding="utf-8"))
