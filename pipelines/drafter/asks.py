"""What the target is asked while it writes training data: wider than the workloads it is tried on.

Every ask is a prompt in token ids, or the opening of one that the target completes itself, given
nothing but the opening of a user turn (arXiv 2406.08464) and sometimes a first word. Some of what
it writes so is a document, and a question about it follows; some conversations go on after an
answer.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipelines.workloads import WORKLOADS, Function, prompts, standard_library_functions

LONGEST = 1000
"""Tokens of a prompt; longer ones are left out."""
LONGEST_INSTRUCTION, LONGEST_DOCUMENT = 80, 400
"""Tokens that the target writes for a user."""
GOES_ON = 0.15
"""Share of conversations that go on after an answer."""
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


DOCUMENTS = (
    "Summarize the following article.\n\n",
    "Text:",
    "Passage 1:",
    "Article:\n",
    "Read this story.\n\n",
    "Context:",
    "Here is a report.\n\n",
    "Fix the bug in this code.\n\n```python\nimport ",
    "Here is my file:\n```python\n#",
    '{"name": "',
    '[{"id": 1, "',
    "Email thread:\n\nFrom:",
    "Transcript of a meeting:\n",
    "# Introduction\n",
    "User manual\n",
)
QUESTIONS = (
    """
Summarize the text above in three sentences.|What is it about?|What happened, in one sentence?
List the names that occur above.|Give the main points as a list.|Return the key facts as JSON.
Rewrite it and correct all mistakes.|Write it again, shorter.|Explain it step by step.
Which part is the most important? Quote it.|Translate it to Spanish.|Write a title for it.
""".strip()
    .replace("\n", "|")
    .split("|")
)
FOLLOW_UPS = (
    """
Why?|Give an example.|Make it shorter.|Say that again in simple words.|Repeat your answer as a list.
Now return it as JSON.|Rewrite your answer and fix any mistake.|Continue.|Explain it in detail.
Add comments and return the whole code again.|Change the names in it and write it again.|Sure?
Turn it into a table.|Write a test for it.|What else should I know?|Summarize our conversation.
""".strip()
    .replace("\n", "|")
    .split("|")
)


@dataclass(frozen=True)
class Ask:
    """The beginning of a conversation."""

    tokens: list[int]
    longest: int = 0
    """Tokens by which the target goes on with the user's turn at most; 0: it answers at once."""
    closing: tuple[int, ...] = ()
    """Ends the user's turn behind what the target wrote of it."""
    follow_ups: tuple[tuple[int, ...], ...] = ()
    """Each stands between an answer and the next: the end of its turn and a whole one of a user."""


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
    text = _excerpt(rng, rng.choice((500, 900, 1500, 2500, 3500)))
    return rng.choice([f"{ask}\n\n{text}", f"Text: {text}\n\n{ask}"])


def _file(rng: random.Random, functions: tuple[Function, ...]) -> str:
    """Several functions, and something to do with one of them."""
    shown = rng.sample(functions, rng.randint(2, 5))
    name = rng.choice(shown).name
    ask = rng.choice(
        [
            f"Rewrite the function `{name}` with type hints and return it.",
            f"Add a docstring to `{name}` and return the complete file.",
            f"Where is `{name}` used, and what does it do?",
            f"Rename `{name}` to `new_{name}` and return the whole file.",
            f"Write a function that calls `{name}`.",
        ]
    )
    code = "```python\n" + "\n\n".join(f.source for f in shown) + "\n```"
    return rng.choice([f"{ask}\n\n{code}", f"{code}\n\n{ask}"])


def _records(rng: random.Random) -> str:
    """Rows as JSON, and a question."""
    names = rng.sample(COLUMNS, rng.randint(3, 5))
    rows = [
        {n: rng.choice((rng.randint(1, 2000), f"{rng.choice(TABLES)} {i}")) for n in names}
        for i in range(rng.randint(3, 12))
    ]
    ask = rng.choice(
        [
            f"Return the rows sorted by {names[0]}, as JSON.",
            f"Remove the field {names[1]} and return the JSON.",
            f"Convert this to a Markdown table with the columns {', '.join(names)}.",
            f"Which row has the largest {names[0]}? Answer with the row.",
            "Write one INSERT statement a row.",
        ]
    )
    return f"{ask}\n\n{json.dumps(rows, indent=rng.choice((None, 2)))}"


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
    kind = rng.randrange(7)
    if kind == 0:
        return _sql(rng)
    if kind in (1, 2):
        return _summary(rng)
    if kind == 3:
        return _file(rng, functions)
    if kind == 4:
        return _records(rng)
    return _from_tests(rng, functions) if kind == 5 else _call(rng, functions)


def _user(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return ids


class Turns(NamedTuple):
    """Token ids around what is said."""

    opening: list[int]
    """Before the user's first words."""
    bridge: list[int]
    """From the user's last word to the answer's first; begins with the token that ends a turn."""
    again: list[int]
    """From the answer's last word to the user's next; begins with that token, too."""


def turns(tokenizer: Any) -> Turns:
    """The tokens of ``tokenizer``'s chat template."""
    said = [{"role": role, "content": "\x00"} for role in ("user", "assistant", "user")]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    parts = text.split("\x00")[:3]
    return Turns(*(tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts))


def asks(tokenizer: Any, seed: int) -> Iterator[Ask]:
    """Endless: of twenty asks five are workloads (``train`` side), ten the target's own, four other
    tasks, and one a document of the target's own with a question behind it.

    Most are short, since a token behind a long context takes three times as long to write.
    """
    rng = random.Random(f"asks/{seed}")
    functions = standard_library_functions("train")
    streams = [prompts(w, "train", seed) for w in WORKLOADS]
    around = turns(tokenizer)

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    starts, documents = ids(STARTS), ids(DOCUMENTS)
    questions = ids([f"\n\n{question}" for question in QUESTIONS])
    more = [(*around.again, *said, *around.bridge) for said in ids(FOLLOW_UPS)]
    while True:
        kind, goes_on = rng.random(), rng.random() < GOES_ON
        then = tuple(rng.sample(more, rng.randint(1, 2))) if goes_on else ()
        if kind < 0.25:
            messages = list(next(rng.choice(streams)).messages)
            ask = Ask(_user(tokenizer, messages), follow_ups=then)
        elif kind < 0.75:
            start = rng.choice(starts) if rng.random() < 0.6 else []
            ask = Ask([*around.opening, *start], LONGEST_INSTRUCTION, follow_ups=then)
        elif kind < 0.95:
            text = _task(rng, functions)
            ask = Ask(_user(tokenizer, [{"role": "user", "content": text}]), follow_ups=then)
        else:
            begun, question = rng.choice(documents), tuple(rng.choice(questions))
            ask = Ask([*around.opening, *begun], LONGEST_DOCUMENT, question, then)
        if len(ask.tokens) <= LONGEST:
            yield ask
