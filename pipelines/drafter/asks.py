"""What the target is asked while it writes training data: wider than the workloads it is tried on.

Every ask is a prompt in token ids, or the opening of one that the target completes itself, given
nothing but the opening of a user turn (arXiv 2406.08464) and sometimes a first word.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.workloads import WORKLOADS, Function, prompts, standard_library_functions

LONGEST = 560
"""Tokens of a prompt; longer ones are left out."""
STARTS = (
    """
Write|Explain|What is|How do I|How can I|Create|Give me|Summarize|Describe|Why|Can you|List
Translate|Write a Python function|Write a SQL query|Write a short story|Given the following|Identify
Rewrite
Who|When|Compare|Suggest|Design|Find|Classify|Generate|Edit the following|In the context of|I am
Solve|Calculate|Is|Do you|Tell me|Discuss|Analyze|Imagine|Convert|Name|Where|Should|Write an essay
Implement|What are|Write a poem|Write a letter|Extract|Answer the question|Suppose|Let's
""".strip()
    .replace("\n", "|")
    .split("|")
)
COLUMNS = (
    """
name|city|country|age|price|year|title|email|salary|status|rating|start_date|quantity|category
population|capacity|duration|weight|gender|address|phone|score|amount|director|genre|budget
""".strip()
    .replace("\n", "|")
    .split("|")
)
TABLES = (
    """
student|teacher|course|employee|department|product|customer|orders|movie|singer|concert|stadium|city
country|airport|flight|book|author|library|team|player|match|hospital|doctor|patient|car|owner|shop
""".strip()
    .replace("\n", "|")
    .split("|")
)


@dataclass(frozen=True)
class Ask:
    """The beginning of a conversation."""

    tokens: list[int]
    open: bool
    """The target goes on with the user's turn; otherwise it answers."""


def _schema(rng: random.Random) -> tuple[list[str], dict[str, list[str]]]:
    names = rng.sample(TABLES, rng.randint(1, 4))
    return names, {
        n: [f"{n}_id", *rng.sample(COLUMNS, rng.randint(2, 6)), *(f"{o}_id" for o in names[:1])]
        for n in names
    }


def _sql(rng: random.Random) -> str:
    names, tables = _schema(rng)
    table, other = rng.choice(names), rng.choice(names)
    column, second = rng.choice(tables[table]), rng.choice(tables[other])
    question = rng.choice(
        [
            f"How many {table}s are there?",
            f"Show the {column} of every {table}, ordered by {tables[table][1]}.",
            f"What is the average {column} of the {table}s for each {second}?",
            f"Find the {second} of the {other} with the highest {column}.",
            f"List the distinct {column} of {table}s whose {tables[table][1]} is above 20.",
            f"Which {table}s have no {other}? Return their {column}.",
            f"Return the number of {table}s by {column}, most frequent first.",
        ]
    )
    if rng.random() < 0.5:
        shown = "\n".join(
            f"CREATE TABLE {n} (\n" + ",\n".join(f"  {c} TEXT" for c in tables[n]) + "\n);"
            for n in names
        )
    else:
        shown = "\n".join(f"Table {n}, columns = [{', '.join(tables[n])}]" for n in names)
    ask = rng.choice(["Write a SQL query that answers the question.", "Answer in SQL only."])
    return rng.choice(
        [f"{shown}\n\n{ask}\n{question}", f"{ask}\n\n{shown}\n\nQuestion: {question}"]
    )


def _excerpt(rng: random.Random, longest: int) -> str:
    """Consecutive paragraphs of Python's reference documentation, up to ``longest`` characters."""
    text = rng.choice(list(pydoc_data.topics.topics.values()))
    paragraphs = [p for p in re.split(r"\n\s*\n", text) if len(p) > 40] or [text]
    begin = rng.randrange(len(paragraphs))
    kept = ""
    for p in paragraphs[begin:]:
        if kept and len(kept) + len(p) > longest:
            break
        kept += p + "\n\n"
    return kept[:longest].strip()


def _summary(rng: random.Random) -> str:
    ask = rng.choice(
        [
            "Summarize the following text in three sentences.",
            "What are the main points of this text?",
            "Write a short summary of the text.",
            "Rewrite this text in simple words.",
            "Write three questions that the text answers, with the answers.",
            "Return the key facts of the text as JSON.",
        ]
    )
    text = _excerpt(rng, rng.choice((500, 900, 1500)))
    return rng.choice([f"{ask}\n\n{text}", f"Text: {text}\n\n{ask}"])


def _from_tests(rng: random.Random, functions: tuple[Function, ...]) -> str:
    f = rng.choice([f for f in rng.choices(functions, k=20) if f.doc] or functions[:1])
    values = ", ".join(rng.choice(("3", "[1, 2, 3]", "'abc'", "10", "(4, 5)")) for _ in f.arguments)
    return rng.choice(
        [
            f"Write a python function. {f.doc}\nYour code should pass this test:\n"
            f"assert {f.name}({values}) == {rng.randint(0, 9)}",
            f"Explain what this code does.\n\n```python\n{f.source}\n```",
            f"Write unit tests for this function.\n\n```python\n{f.source}\n```",
            f"Find a bug in this function or improve it.\n\n```python\n{f.source}\n```",
        ]
    )


def _call(rng: random.Random, functions: tuple[Function, ...]) -> str:
    offered = [
        {
            "name": f.name,
            "description": f.doc[:160],
            "parameters": {
                "type": "dict",
                "properties": {a: {"type": "string"} for a in f.arguments[:3]},
                "required": list(f.arguments[:2]),
            },
        }
        for f in rng.sample(functions, rng.randint(1, 3))
    ]
    f = rng.choice(offered)
    values = " and ".join(f"{a} {rng.choice(COLUMNS)!r}" for a in f["parameters"]["properties"])  # type: ignore[index]
    return (
        "Choose the function to call and its arguments. Answer with JSON only.\n"
        f"{json.dumps(offered)}\nQuestion: use {f['name']} with {values or 'no arguments'}."
    )


def _task(rng: random.Random, functions: tuple[Function, ...]) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return _sql(rng)
    if kind == 1:
        return _summary(rng)
    return _from_tests(rng, functions) if kind == 2 else _call(rng, functions)


def _user(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return ids


def turn(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that open a user turn, and those between its text and the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\x00"}], tokenize=False, add_generation_prompt=True
    )
    opening, bridge = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split("\x00")
    )
    return opening, bridge


def asks(tokenizer: Any, seed: int) -> Iterator[Ask]:
    """Endless: four tenths workloads (``train`` side), four the target's own, two other tasks."""
    rng = random.Random(f"asks/{seed}")
    functions = standard_library_functions("train")
    streams = [prompts(w, "train", seed) for w in WORKLOADS]
    opening, _ = turn(tokenizer)
    starts = [tokenizer(s, add_special_tokens=False)["input_ids"] for s in STARTS]
    while True:
        kind = rng.random()
        if kind < 0.4:
            messages = list(next(rng.choice(streams)).messages)
            ask = Ask(_user(tokenizer, messages), False)
        elif kind < 0.8:
            start = rng.choice(starts) if rng.random() < 0.6 else []
            ask = Ask([*opening, *start], True)
        else:
            text = _task(rng, functions)
            ask = Ask(_user(tokenizer, [{"role": "user", "content": text}]), False)
        if len(ask.tokens) <= LONGEST:
            yield ask
