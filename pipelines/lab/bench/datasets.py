"""The paper's sixteen datasets (Table 8), from the hub through the ``datasets`` library.

The paper names dataset, prompt count and split seed; which split and which fields of a row make the
prompt it does not say. Here it is the test split, else validation, else the only one there is, and
the wording is the project's own. A builder takes one row as the hub's copy has it and raises
``KeyError``, ``ValueError`` or ``TypeError`` where the row lacks what it needs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from decoder.contracts.errors import ModelError, SettingsError
from pipelines.prompts import Message, Prompt, PromptSet

SPLIT_SEED: Final = 42  # Table 6

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
    messages = [
        {"role": m["role"], "content": m["content"]} for m in first if m["role"] != "system"
    ]
    return [{"role": "system", "content": system}, *messages]


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
mt_bench = _filled("{prompt[0]}")  # the first turn of a question


@dataclass(frozen=True)
class Source:
    """Where a dataset is and how its rows become prompts. ``files`` limits what is fetched."""

    family: str
    hub: str
    split: str
    build: Builder
    config: str | None = None
    files: str | None = None


CODE, LONG, HOPS, OPEN = "code", "long_context", "multihop_qa", "open_ended"
SOURCES: Final[dict[str, Source]] = {
    "delegate52": Source("agentic", "microsoft/delegate52", "test", delegate52),
    "fineedit": Source("agentic", "YimingZeng/FineEdit_bench", "train", fineedit),
    "repobench": Source(CODE, "tianyang/repobench_python_v1.1", "cross_file_first", repobench),
    "swebench_openhands": Source(CODE, "SWE-bench/SWE-bench_Verified", "test", swebench),
    "magicoder": Source(CODE, "ise-uiuc/Magicoder-Evol-Instruct-110K", "train", instruction),
    "mbpp": Source(CODE, "google-research-datasets/mbpp", "test", mbpp, "full"),
    "bfcl": Source("structured", "llamastack/bfcl_v3", "train", bfcl),
    "spider": Source("structured", "NBAmine/xlangai-spider-with-context", "validation", spider),
    "hotpotqa": Source(HOPS, "hotpotqa/hotpot_qa", "validation", hotpotqa, "distractor"),
    "musique": Source(HOPS, "dgslibisey/MuSiQue", "validation", musique),
    # a copy of the paper's GitHub repository that needs no loading script
    "2wikimultihopqa": Source(HOPS, "framolfese/2WikiMultihopQA", "validation", hotpotqa),
    # one task of twelve; the whole has many gigabytes, and columns differ between files
    "infinitebench": Source(
        LONG,
        "xinrongzhang2022/InfiniteBench",
        "train",
        infinitebench,
        files="longbook_qa_eng.jsonl",
    ),
    "cnn_dailymail": Source(LONG, "abisee/cnn_dailymail", "test", cnn_dailymail, "3.0.0"),
    "gov_report": Source(LONG, "ccdv/govreport-summarization", "test", gov_report),
    "alpaca": Source(OPEN, "tatsu-lab/alpaca", "train", instruction),
    # the same eighty questions as the paper's (EAGLE's copy)
    "mt_bench": Source(OPEN, "HuggingFaceH4/mt_bench_prompts", "train", mt_bench),
}
"""By name, in the order of the paper's Table 1."""


def load(names: Sequence[str], count: int, problems: list[str]) -> Iterator[PromptSet]:
    """Up to ``count`` prompts of each dataset of ``names`` (none means all), drawn by the seed.

    A dataset that is unknown or cannot be fetched becomes a sentence in ``problems``.

    Raises:
        SettingsError: the ``datasets`` library is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise SettingsError(
            "loading from the hub needs the 'datasets' package: pip install "
            "'hybrid-verified-decoding[bench]', or give local prompts with --prompts."
        )
    for name in names or SOURCES:
        if name not in SOURCES:
            problems.append(f"dataset {name!r} left out: there are {', '.join(SOURCES)}.")
            continue
        try:
            rows = fetch(SOURCES[name], count)
        except ModelError as error:
            problems.append(f"dataset {name!r} left out: {error}")
            continue
        prompts = prompt_set(name, rows, problems)
        if prompts is not None:
            yield prompts


def fetch(source: Source, count: int) -> list[Row]:
    """The first ``count`` rows of the shuffled split.

    Raises:
        ModelError: the hub cannot be reached, or has no such dataset or split.
    """
    from datasets import DownloadConfig, load_dataset

    try:
        rows: Any = load_dataset(
            source.hub,
            source.config,
            split=source.split,
            data_files=source.files,
            download_config=DownloadConfig(max_retries=1),
        )
        rows = rows.shuffle(seed=SPLIT_SEED)
        return [rows[i] for i in range(min(count, len(rows)))]
    except Exception as error:  # library and hub client raise many types
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ModelError(
            f"{source.hub} cannot be loaded from the hub ({cause}); "
            "check the connection, or give its prompts with --prompts."
        ) from error


def prompt_set(name: str, rows: Sequence[Row], problems: list[str]) -> PromptSet | None:
    """The prompts that ``rows`` make; rows without the fields needed are named and skipped."""
    source, prompts = SOURCES[name], []
    for number, row in enumerate(rows, start=1):
        try:
            messages = source.build(row)
            if not any(m["content"].strip() for m in messages):
                raise ValueError("the prompt is empty")
        except (LookupError, ValueError, TypeError, AttributeError, StopIteration) as error:
            fields, kind = ", ".join(sorted(row)), type(error).__name__
            problems.append(f"{name} row {number} skipped: {kind} {error} among {fields}.")
            continue
        prompts.append(Prompt(f"{name}/{number}", name, source.family, tuple(messages)))
    if not prompts:
        problems.append(f"dataset {name!r} left out: {source.hub} gave no usable row.")
        return None
    return PromptSet(name, source.family, tuple(prompts))
