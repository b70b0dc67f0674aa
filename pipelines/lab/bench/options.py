"""The options of ``hvd bench decode`` and ``hvd bench serve``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipelines.options import Drafter, DType, Model
from pipelines.prompts import TooLong


@dataclass(frozen=True)
class DecodeOptions:
    """Options of ``hvd bench decode``; lengths are in tokens."""

    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of <dataset>.jsonl files; default: own workloads."),
    ] = None
    hub: Annotated[
        bool, typer.Option("--hub", help="Load the paper's sixteen datasets from the hub instead.")
    ] = False
    datasets: Annotated[str, typer.Option(help="Only these, separated by commas.")] = ""
    methods: Annotated[
        str,
        typer.Option(
            help="Separated by commas; 'frequency:4' sets a parameter, 'suffix@2' lengthens drafts."
        ),
    ] = "greedy,eagle3,suffix,frequency,arctic,hybrid"
    limit: Annotated[int, typer.Option(min=1, help="Measured prompts of each dataset.")] = 20
    warmup: Annotated[
        int, typer.Option(min=0, help="Further prompts of each that only fill the caches.")
    ] = 1
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a prompt.")] = 128
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=2, help="Prompts longer than this are too long.")
    ] = None
    too_long: Annotated[
        TooLong, typer.Option(help="Skip a prompt that is too long, or truncate its middle.")
    ] = "skip"
    model: Model = None
    drafter: Drafter = None
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Bundle for 'hybrid'; 'name=FILE' adds a method 'hybrid:name'."),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Number format of the models.")
    ] = "float32"
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None
    clock: Annotated[
        Literal["wall", "cpu"],
        typer.Option(help="'cpu' counts processor time, for a machine that does other work."),
    ] = "wall"
    as_json: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "reports/bench/decode.json"
    )
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 unless all outputs equal greedy's.")
    ] = False


@dataclass(frozen=True)
class ServingOptions:
    """Options of ``hvd bench serve``."""

    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL files with 'messages'; default: own workloads."),
    ] = None
    sessions: Annotated[
        bool, typer.Option("--sessions", help="Send sessions: each turn holds the earlier answers.")
    ] = False
    turns: Annotated[int, typer.Option(min=1, help="Most turns of a session.")] = 3
    configs: Annotated[
        str,
        typer.Option(help="What to compare; on an accelerator also eagle3-v2, eagle3-adaptive."),
    ] = "none,suffix,eagle3,hybrid"
    eagle3_k: Annotated[str, typer.Option(help="Draft lengths to try for eagle3.")] = "2,3,4,5"
    suffix_k: Annotated[str, typer.Option(help="Draft limits to try for suffix.")] = "8,24,64"
    concurrency: Annotated[str, typer.Option(help="Concurrent requests.")] = "1,4,8"
    limit: Annotated[int, typer.Option(min=1, help="Prompts for each concurrency.")] = 16
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 96
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Leave out longer prompts; a session's answers count.")
    ] = 2048
    rounds: Annotated[int, typer.Option(min=1, help="Times through all configurations.")] = 3
    model: Model = None
    drafter: Drafter = None
    dtype: DType = "auto"
    policy: Annotated[Path | None, typer.Option(help="Bundle for 'hybrid'.")] = None
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="Run all servers of a round at once, in time slices, if they fit."
        ),
    ] = False
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit status 1 unless all answers equal those of 'none'."),
    ] = False
    as_json: Annotated[
        Path, typer.Option("--json", help="Where to write the report; the servers' logs go beside.")
    ] = Path("reports/bench/serve.json")
