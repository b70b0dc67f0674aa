"""What the target is asked while it writes training data: wider than the workloads it is tried on.

Every ask is a prompt in token ids, or the opening of one that the target completes itself, given
nothing but the opening of a user turn (arXiv 2406.08464) and sometimes a first word. Some of what
it writes so is a document, and a question about it follows; some conversations go on after an
answer. The wording is in ``asks.toml``.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.workloads import WORKLOADS, Function, prompts, standard_library_functions

LONGEST = 1000
"""Tokens of a prompt; longer ones are left out."""
LONGEST_INSTRUCTION, LONGEST_DOCUMENT = 80, 400
"""Tokens that the target writes for a user."""
GOES_ON = 0.15
"""Share of conversations that go on after an answer."""
WORDING = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Ask:
    """The beginning of a conversation."""

    tokens: list[int]
    longest: int = 0
    """Tokens by which the target goes on with the user's turn at most; 0: it answers at once."""
    closing: Sequence[int] = ()
    """Ends the user's turn behind what the target wrote of it."""
    follow_ups: Sequence[Sequence[int]] = ()
    """Each stands between an answer and the next: the end of its turn and a whole one of a user."""


class Turns(NamedTuple):
    """Token ids around what is said."""

    opening: list[int]
    """Before the user's first words."""
    bridge: list[int]
    """From the user's last word to the answer's first; begins with the token that ends a turn."""
    again: list[int]
    """From the answer's last word to the user's next; begins with that token, too."""

    @classmethod
    def of(cls, tokenizer: Any) -> Turns:
        """The tokens of ``tokenizer``'s chat template."""
        said = [{"role": role, "content": "\x00"} for role in ("user", "assistant", "user")]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return cls(*_ids(tokenizer, text.split("\x00")[:3]))


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


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
    rows = [
        {c: rng.choice((rng.randint(1, 2000), f"{rng.choice(names)} {i}")) for c in columns}
        for i in range(rng.randint(3, 12))
    ]
    file = rng.sample(functions, rng.randint(2, 5))
    f = file[0]
    tools = [
        {"name": t.name, "description": t.doc[:160], "parameters": t.arguments[:3]}
        for t in rng.sample(file, min(3, len(file)))
    ]
    given = [f"{a} {rng.choice(WORDING['columns'])!r}" for a in f.arguments[:3]]
    typed = {n: ",\n".join(f"  {c} TEXT" for c in held) for n, held in tables.items()}
    kind = rng.choice(WORDING["tasks"])
    words = {
        "sql": "\n".join(f"CREATE TABLE {n} (\n{held}\n);" for n, held in typed.items()),
        "schema": "\n".join(f"Table {n}, columns = [{', '.join(c)}]" for n, c in tables.items()),
        "table": table,
        "other": other,
        "key": columns[1],
        "column": rng.choice(columns),
        "second": rng.choice(others),
        "columns": ", ".join(columns),
        "rows": json.dumps(rows, indent=rng.choice((None, 2))),
        "short": _excerpt(rng, 900),
        "long": _excerpt(rng, rng.choice((1500, 2500, 3500))),
        "file": "\n\n".join(shown.source for shown in file),
        "name": f.name,
        "source": f.source,
        "doc": f.doc,
        "values": ", ".join(rng.choice(WORDING["values"]) for _ in f.arguments),
        "number": rng.randint(0, 9),
        "tools": json.dumps(tools),
        "arguments": " and ".join(given) or "no arguments",
    }
    ask = rng.choice(kind["asks"]).format(**words)
    text: str = rng.choice(kind["forms"]).format(ask=ask, **words)
    return text


def asks(tokenizer: Any, seed: int) -> Iterator[Ask]:
    """Endless: of twenty asks five are workloads (``train`` side), ten the target's own, four other
    tasks, and one a document of the target's own with a question behind it.

    Most are short, since a token behind a long context takes three times as long to write.
    """
    rng = random.Random(f"asks/{seed}")
    functions = standard_library_functions("train")
    streams = [prompts(w, "train", seed) for w in WORKLOADS]
    opening, bridge, again = Turns.of(tokenizer)
    starts, documents = _ids(tokenizer, WORDING["starts"]), _ids(tokenizer, WORDING["documents"])
    questions = _ids(tokenizer, [f"\n\n{question}" for question in WORDING["questions"]])
    more = [[*again, *said, *bridge] for said in _ids(tokenizer, WORDING["follow_ups"])]

    def said(messages: Sequence[dict[str, str]]) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return ids

    while True:
        kind, goes_on = rng.random(), rng.random() < GOES_ON
        then = rng.sample(more, rng.randint(1, 2)) if goes_on else ()
        if kind < 0.25:
            ask = Ask(said(next(rng.choice(streams)).messages), follow_ups=then)
        elif kind < 0.75:
            start = rng.choice(starts) if rng.random() < 0.6 else []
            ask = Ask([*opening, *start], LONGEST_INSTRUCTION, follow_ups=then)
        elif kind < 0.95:
            task = {"role": "user", "content": _task(rng, functions)}
            ask = Ask(said([task]), follow_ups=then)
        else:
            begun = [*opening, *rng.choice(documents)]
            ask = Ask(begun, LONGEST_DOCUMENT, rng.choice(questions), then)
        if len(ask.tokens) <= LONGEST:
            yield ask
