"""The paper's sixteen datasets (Table 8), from the hub through the ``datasets`` library.

The paper names dataset, prompt count and split seed; which split and which fields of a row make the
prompt it does not say. Here it is the test split, else validation, else the only one there is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from decoder.contracts.errors import ModelError, SettingsError
from pipelines.lab.bench import templates as made
from pipelines.prompts import Prompt, PromptSet

PROMPTS: Final = 20
"""Measured prompts of each dataset (Appendix D)."""
SPLIT_SEED: Final = 42
"""Table 6."""


@dataclass(frozen=True)
class Source:
    """Where a dataset is and how its rows become prompts. ``files`` limits what is fetched."""

    family: str
    hub: str
    split: str
    build: made.Builder
    config: str | None = None
    files: str | None = None


CODE, LONG, HOPS, OPEN = "code", "long_context", "multihop_qa", "open_ended"
SOURCES: Final[dict[str, Source]] = {
    "delegate52": Source("agentic", "microsoft/delegate52", "test", made.delegate52),
    "fineedit": Source("agentic", "YimingZeng/FineEdit_bench", "train", made.fineedit),
    "repobench": Source(CODE, "tianyang/repobench_python_v1.1", "cross_file_first", made.repobench),
    "swebench_openhands": Source(CODE, "SWE-bench/SWE-bench_Verified", "test", made.swebench),
    "magicoder": Source(CODE, "ise-uiuc/Magicoder-Evol-Instruct-110K", "train", made.instruction),
    "mbpp": Source(CODE, "google-research-datasets/mbpp", "test", made.mbpp, "full"),
    "bfcl": Source("structured", "llamastack/bfcl_v3", "train", made.bfcl),
    "spider": Source(
        "structured", "NBAmine/xlangai-spider-with-context", "validation", made.spider
    ),
    "hotpotqa": Source(HOPS, "hotpotqa/hotpot_qa", "validation", made.hotpotqa, "distractor"),
    "musique": Source(HOPS, "dgslibisey/MuSiQue", "validation", made.musique),
    # The paper names the GitHub repository; this is the copy of it that needs no loading script.
    "2wikimultihopqa": Source(HOPS, "framolfese/2WikiMultihopQA", "validation", made.hotpotqa),
    # One task of twelve: the whole is many gigabytes and its files do not share their columns.
    "infinitebench": Source(
        LONG,
        "xinrongzhang2022/InfiniteBench",
        "train",
        made.infinitebench,
        files="longbook_qa_eng.jsonl",
    ),
    "cnn_dailymail": Source(LONG, "abisee/cnn_dailymail", "test", made.cnn_dailymail, "3.0.0"),
    "gov_report": Source(LONG, "ccdv/govreport-summarization", "test", made.gov_report),
    "alpaca": Source(OPEN, "tatsu-lab/alpaca", "train", made.instruction),
    # The paper took EAGLE's copy of the questions; these are the same eighty.
    "mt_bench": Source(OPEN, "HuggingFaceH4/mt_bench_prompts", "train", made.mt_bench),
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
    if not hub_answers():
        problems.append("the hub cannot be reached: only datasets fetched before can be used.")
    for name in names or SOURCES:
        if name not in SOURCES:
            problems.append(f"dataset {name!r} left out: there are {', '.join(SOURCES)}.")
            continue
        try:
            rows = fetch(SOURCES[name], count)
        except ModelError as error:
            problems.append(f"dataset {name!r} left out: {error}")
            continue
        found = prompt_set(name, rows, problems)
        if found is not None:
            yield found


def hub_answers() -> bool:
    """Whether the hub can be reached: asked once, as each dataset would try for half a minute.

    If not, this process's hub libraries use what they have fetched before, and nothing else.
    """
    import datasets
    import httpx
    from huggingface_hub import constants

    try:
        httpx.head(constants.ENDPOINT, timeout=5.0)
    except httpx.HTTPError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return False
    return True


def fetch(source: Source, count: int) -> list[made.Row]:
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
    except Exception as error:  # the library and the hub client raise dozens of kinds
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ModelError(
            f"{source.hub} cannot be loaded from the hub ({cause}); "
            "check the connection, or give its prompts with --prompts."
        ) from error


def prompt_set(name: str, rows: Sequence[made.Row], problems: list[str]) -> PromptSet | None:
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
