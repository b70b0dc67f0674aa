"""From a dataset's row to the messages of a prompt, by dataset; the wording is the project's own.

A builder takes one row as the hub's copy has it and raises ``KeyError``, ``ValueError`` or
``TypeError`` where the row lacks what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.prompts import Message

Row = Mapping[str, Any]
Builder = Callable[[Row], list[Message]]


def _user(*parts: str) -> list[Message]:
    return [{"role": "user", "content": "\n\n".join(part.strip() for part in parts if part)}]


def _filled(*parts: str) -> Builder:
    return lambda row: _user(*(part.format_map(row) for part in parts))


def _fenced(name: str, text: str) -> str:
    return f"{name}\n```\n{text}\n```"


def delegate52(row: Row) -> list[Message]:
    """The first edit of a work environment: its files, then what to change."""
    start = row["metadata"].get("start_state", "basic_state")
    state = next(s for s in row["states"] if s["state_id"] == start)
    return _user(
        "You edit documents for a colleague. These are the files of the work folder:",
        *(_fenced(name, row["files"][f"{start}/{name}"]) for name in state["context"]),
        f"The request: {state['prompts'][0]['prompt']}",
        "Write out every file that the request changes or adds, complete, under its name.",
    )


def repobench(row: Row) -> list[Message]:
    """Snippets of other files, then the file to go on with."""
    code = f"{row['import_statement']}\n{row['cropped_code']}"
    return _user(
        "Parts of a Python repository that may matter:",
        *(_fenced(f"# {s['path']}", s["snippet"]) for s in row["context"]),
        f"Continue this file from where it stops.\n{_fenced('# ' + row['file_path'], code)}",
    )


def instruction(row: Row) -> list[Message]:
    """An instruction, with its input where there is one."""
    return _user(row["instruction"], row.get("input") or "")


def mbpp(row: Row) -> list[Message]:
    """A programming task with its tests."""
    return _user(
        f"Write a Python function for this task: {row['text']}",
        "It has to pass:\n" + "\n".join(row["test_list"]),
    )


def bfcl(row: Row) -> list[Message]:
    """Functions as JSON, and the first turn of a question to answer by calling them."""
    turns = json.loads(row["turns"])
    first = turns[0] if turns and isinstance(turns[0], list) else turns
    system = (
        "Answer only with calls of the functions below, written [name(argument=value, ...), ...]. "
        "Say so where none of them fits or an argument is missing.\n\n"
        + json.dumps(json.loads(row["functions"]), indent=1)
    )
    said = [{"role": m["role"], "content": m["content"]} for m in first if m["role"] != "system"]
    return [{"role": "system", "content": system}, *said]


def _question_over(paragraphs: Sequence[tuple[str, str]], question: str) -> list[Message]:
    return _user(
        *(f"{title}\n{text}" for title, text in paragraphs),
        f"Question: {question}",
        "Say which passages matter and what follows from them, then give the answer.",
    )


def hotpotqa(row: Row) -> list[Message]:
    """All paragraphs of a HotpotQA or 2WikiMultiHopQA item, then its question."""
    context = row["context"]
    texts = [" ".join(s.strip() for s in sentences) for sentences in context["sentences"]]
    return _question_over(list(zip(context["title"], texts, strict=True)), row["question"])


def musique(row: Row) -> list[Message]:
    """All paragraphs of a MuSiQue item, then its question."""
    paragraphs = [(p["title"], p["paragraph_text"]) for p in row["paragraphs"]]
    return _question_over(paragraphs, row["question"])


fineedit = _filled(
    "Apply the edit to the text. Change nothing else and answer with the whole edited text.",
    "Edit: {edit_request}",
    "Text:\n{context}",
)
swebench = _filled(
    "A checkout of {repo} at commit {base_commit} lies in /workspace.",
    "<issue>\n{problem_statement}\n</issue>",
    "Resolve the issue in the source files; the tests are right and stay as they are. Work in "
    "order: find the code concerned, reproduce the fault with a small script, mend it, run the "
    "script again, and think of edge cases. Begin with the first step and the command for it.",
)
"""An agent's opening instruction around a real issue, after OpenHands' for SWE-bench."""
spider = _filled(
    "Database schema:\n{context}", "Question: {question}", "Answer with one SQLite query."
)
infinitebench = _filled(
    "Read the book and answer the question after it.\n\n{context}", "Question: {input}"
)
cnn_dailymail = _filled("Summarise this article in a few sentences.\n\n{article}")
gov_report = _filled("Write a one-page summary of this report.\n\n{report}", "Summary:")
mt_bench = _filled("{prompt[0]}")
"""The first turn of a question."""
