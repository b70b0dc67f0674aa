"""Conversations nobody has to generate: standard-library code and documentation as the answer.

The label is the target's own distribution whoever wrote the text, and reading costs a CPU about a
sixth of writing. ``train`` side of the split only.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.workloads import Function, standard_library_functions

LONGEST, SHORTEST_ANSWER = 700, 20
LONGEST_TOPIC = 1600
"""Characters."""


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


def write(tokenizer: Any, out: Path, functions: int = 260, topics: int = 60, seed: int = 5) -> int:
    """Write ``out`` in the form of ``generations.jsonl``, in random order.

    Returns:
        the number of conversations.
    """
    records = []
    for ask, answer in _pairs(functions, topics, seed):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], add_generation_prompt=True, return_dict=False
        )
        output = tokenizer(answer, add_special_tokens=False)["input_ids"]
        output = [*output, tokenizer.eos_token_id][: max(0, LONGEST - len(prompt))]
        if len(output) >= SHORTEST_ANSWER:
            # any temperature but 0, which would mean "the target's likeliest"
            records.append({"prompt": prompt, "output": output, "temperature": 1.0})
    random.Random(seed).shuffle(records)
    out.write_text("".join(json.dumps(r) + "\n" for r in records))
    return len(records)
