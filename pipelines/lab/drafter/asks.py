"""What the target is asked while it writes training data: wider than the workloads it is tried on.

Every ask is a prompt, or the opening of one that the target completes itself, given that of a user
turn alone (arXiv 2406.08464), sometimes with a first word. The wording is in ``asks.toml``.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.workloads import WORKLOADS, Function, prompts, standard_library_functions

LONGEST, INSTRUCTION = 1000, 80
"""Tokens of a prompt, longer ones are left out; and of what the target says for a user at most."""
WORDING = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def turn(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before a user's words, and between them and the answer."""
    said = [{"role": "user", "content": "\x00"}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    opening, bridge = tokenizer(text.split("\x00"), add_special_tokens=False)["input_ids"]
    return opening, bridge


def _excerpt(rng: random.Random, longest: int) -> str:
    """Consecutive paragraphs of Python's reference documentation, up to ``longest`` characters."""
    text = rng.choice(list(pydoc_data.topics.topics.values()))
    paragraphs = [p for p in text.split("\n\n") if len(p) > 40] or [text]
    return "\n\n".join(paragraphs[rng.randrange(len(paragraphs)) :])[:longest].strip()


def _task(rng: random.Random, functions: Sequence[Function]) -> str:
    """One of the tasks: of made-up tables, the standard library, or its documentation."""
    names = rng.sample(WORDING["tables"], rng.randint(1, 4))
    tables = {n: [f"{n}_id", *rng.sample(WORDING["columns"], rng.randint(2, 6))] for n in names}
    (table, columns), (other, others) = rng.choices(list(tables.items()), k=2)
    rows = [{c: rng.randint(1, 2000) for c in columns} for _ in range(rng.randint(3, 12))]
    file = rng.sample(functions, rng.randint(2, 5))
    f = next((f for f in file if f.doc), file[0])
    words = {
        "sql": "\n".join(f"CREATE TABLE {n} ({', '.join(c)});" for n, c in tables.items()),
        "schema": "\n".join(f"Table {n}, columns = [{', '.join(c)}]" for n, c in tables.items()),
        "table": table,
        "other": other,
        "key": columns[1],
        "column": rng.choice(columns),
        "second": rng.choice(others),
        "rows": json.dumps(rows, indent=rng.choice((None, 2))),
        "text": _excerpt(rng, rng.choice((500, 900, 1500, 2500, 3500))),
        "file": "\n\n".join(shown.source for shown in file),
        "name": f.name,
        "source": f.source,
        "doc": f.doc,
        "tools": json.dumps([{"name": t.name, "parameters": t.arguments} for t in file]),
        "values": ", ".join(rng.choice(WORDING["values"]) for _ in f.arguments),
    }
    kind = rng.choice(WORDING["tasks"])
    ask = rng.choice(kind["asks"]).format(**words)
    text: str = rng.choice(kind["forms"]).format(ask=ask, **words)
    return text


def asks(tokenizer: Any, seed: int) -> Iterator[tuple[list[int], bool]]:
    """Endless: token ids, and whether they are a whole prompt or the opening of one.

    A quarter are workloads (``train`` side), half the target's own, a quarter other tasks. Most are
    short, since a token behind a long context takes three times as long to write.
    """
    rng, functions = random.Random(f"asks/{seed}"), standard_library_functions("train")
    streams, (opening, _) = [prompts(w, "train", seed) for w in WORKLOADS], turn(tokenizer)
    while True:
        kind = rng.random()
        if kind < 0.5:
            start = rng.choice(WORDING["starts"]) if rng.random() < 0.6 else ""
            begun = tokenizer(start, add_special_tokens=False)["input_ids"]
            yield [*opening, *begun], False
            continue
        said = [{"role": "user", "content": _task(rng, functions)}]
        if kind < 0.75:
            said = list(next(rng.choice(streams)).messages)
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        if len(ids) <= LONGEST:
            yield ids, True
