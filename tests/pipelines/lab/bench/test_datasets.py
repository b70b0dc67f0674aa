"""The sixteen datasets: rows in the hub's layouts become prompts; what is missing is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelines.lab.bench import datasets

HOTPOT = {
    "question": "Who wrote it?",
    "context": {"title": ["One", "Two"], "sentences": [["A.", " B."], ["C.", "D."]]},
}

STATE = {"state_id": "b", "context": ["a.ledger"], "prompts": [{"prompt": "split by person"}]}
FILES = {"b/a.ledger": "2016 Coffee $2", "distractor_context/x.md": "distractor"}
SNIPPET = {"identifier": "f", "path": "a.py", "snippet": "def f(): ..."}
PLACE = {"import_statement": "from a import f", "cropped_code": "x = 1", "file_path": "b.py"}
ISSUE = {"repo": "django/django", "base_commit": "abc", "problem_statement": "It breaks."}
TURNS = json.dumps([[{"role": "user", "content": "Is it wet in Rome?"}]])
ROWS: dict[str, dict[str, Any]] = {
    "delegate52": {"metadata": {"start_state": "b"}, "states": [STATE], "files": FILES},
    "fineedit": {"context": "teh text", "edit_request": "mend the typo", "edit_content": "x"},
    "repobench": {"context": [SNIPPET], **PLACE, "next_line": "f()"},
    "swebench_openhands": ISSUE,
    "magicoder": {"instruction": "Sort a list.", "response": "..."},
    "mbpp": {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3"]},
    "bfcl": {"functions": json.dumps([{"name": "weather"}]), "turns": TURNS},
    "spider": {"context": "CREATE TABLE t (a)", "question": "How many?", "db_id": "d"},
    "hotpotqa": HOTPOT,
    "musique": {"paragraphs": [{"title": "One", "paragraph_text": "A."}], "question": "Who?"},
    "2wikimultihopqa": HOTPOT,
    "infinitebench": {"context": "A whole book.", "input": "Who did it?", "answer": ["me"]},
    "cnn_dailymail": {"article": "Something happened.", "highlights": "x"},
    "gov_report": {"report": "A long report.", "summary": "x"},
    "alpaca": {"instruction": "Translate.", "input": "Bonjour", "output": "Hello"},
    "mt_bench": {"prompt": ["First turn.", "Second turn."], "category": "writing"},
}

EXPECTED = {
    "delegate52": ["a.ledger", "2016 Coffee $2", "split by person"],
    "repobench": ["a.py", "def f(): ...", "from a import f\nx = 1"],
    "mbpp": ["assert add(1, 2) == 3"],
    "hotpotqa": ["One\nA. B.", "Two\nC. D.", "Question: Who wrote it?"],
    "spider": ["CREATE TABLE t (a)", "How many?"],
    "alpaca": ["Translate.\n\nBonjour"],
    "bfcl": ["weather", "Is it wet in Rome?"],
}


@pytest.mark.parametrize("name", datasets.SOURCES)
def test_a_row_becomes_a_prompt_and_one_of_another_layout_is_named(name: str) -> None:
    assert len(datasets.SOURCES) == 16, "the paper's"
    problems: list[str] = []
    found = datasets.prompt_set(name, [{"another": "x"}, ROWS[name]], problems)
    assert found is not None and len(found.prompts) == len(problems) == 1
    assert problems[0].startswith(f"{name} row 1 skipped: ") and "another" in problems[0]
    text = found.prompts[0].text
    assert all(part in text for part in EXPECTED.get(name, [])) and "distractor" not in text
    assert found.prompts[0].messages[-1]["role"] == "user"
