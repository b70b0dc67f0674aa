"""Step 2: conversations nobody has to generate: standard-library code and texts as the answer.

The label is the target's own distribution whoever wrote the text, and reading costs a CPU about a
sixth of writing. ``train`` side of the split only.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pipelines.drafter.lockstep import Llama, Slots
from pipelines.drafter.shards import AUX_LAYERS, SEQUENCES, write_shard
from pipelines.progress import Step
from pipelines.workloads import Function, standard_library_functions

LONGEST, SHORTEST_ANSWER = 700, 20
LONGEST_TOPIC = 1600
"""Characters."""
FUNCTIONS, TOPICS, SEED = 600, 200, 5


def _edited(f: Function) -> tuple[str, str]:
    name = f.arguments[0] if f.arguments else f.name
    ask = (
        f"Edit this Python function. Rename the variable `{name}` to `{name}_value` everywhere. "
        f"Return the whole function.\n\n```python\n{f.source}\n```"
    )
    renamed = re.sub(rf"\b{re.escape(name)}\b", f"{name}_value", f.source)
    return ask, f"```python\n{renamed}\n```"


def _described(f: Function) -> tuple[str, str]:
    ask = f"Write a Python function `{f.name}({', '.join(f.arguments)})`. {f.doc} Add comments."
    return ask, f"```python\n{f.source}\n```\n\n{f.doc}"


def _pairs(functions: int, topics: int, seed: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    train = standard_library_functions("train")
    for f in rng.sample(train, min(functions, len(train))):
        yield _edited(f) if rng.random() < 0.5 else _described(f)
    documented = list(pydoc_data.topics.topics.items())
    for name, text in rng.sample(documented, min(topics, len(documented))):
        yield f"Explain {name} in Python.", text[:LONGEST_TOPIC]


def _conversations(tokenizer: Any) -> list[tuple[list[int], int]]:
    """Token ids, and how many of them are prompt, in random order."""
    kept = []
    for ask, answer in _pairs(FUNCTIONS, TOPICS, SEED):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], add_generation_prompt=True, return_dict=False
        )
        output = tokenizer(answer, add_special_tokens=False)["input_ids"]
        output = [*output, tokenizer.eos_token_id][: max(0, LONGEST - len(prompt))]
        if len(output) >= SHORTEST_ANSWER:
            kept.append(([*prompt, *output], len(prompt)))
    random.Random(SEED).shuffle(kept)
    return kept


def read(model_path: Path, out: Path, dtype: torch.dtype, step: Step, first_shard: int) -> None:
    """Let the target read them, and write the shards from ``first_shard`` on that are not there."""
    from transformers import AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    conversations = _conversations(AutoTokenizer.from_pretrained(model_path))
    slots = Slots(Llama.load(model_path, dtype), 1, LONGEST, AUX_LAYERS)
    for begin in range(0, len(conversations), SEQUENCES):
        step("reading what others wrote, conversations", begin, len(conversations))
        some, index = conversations[begin : begin + SEQUENCES], first_shard + begin // SEQUENCES
        if any(out.glob(f"{index:05d}-*.safetensors")):
            continue
        states = [slots.read(0, tokens) for tokens, _ in some]
        kept = [
            # not greedy: the answer is not what the target would have said
            (tokens, prompt, False, seen.aux, seen.final.bfloat16())
            for (tokens, prompt), seen in zip(some, states, strict=True)
        ]
        write_shard(out, index, kept, AUX_LAYERS)
