"""What the tests of the serving benchmark share: setups to compare, something to ask, servers."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from pipelines.lab.bench.serve.load import Reply
from pipelines.lab.bench.serve.run import parse
from pipelines.lab.bench.serve.setups import Plan, Setup
from pipelines.lab.bench.serve.summary import Level
from pipelines.prompts import Prompt
from pipelines.serve.command import ServeOptions

NONE, SUFFIX = Setup("none", "none"), Setup("suffix-k8", "suffix", 8)
EAGLE3, HYBRID = Setup("eagle3-k3", "eagle3", 3, True), Setup("hybrid", "hybrid")
OPTIONS = ServeOptions("owner/model", "owner/head", port=8123, served_name="m")


def said(*words: str) -> tuple[dict[str, str], ...]:
    """Messages: a word is a user's, ``>word`` an assistant's, ``>`` where the server answers."""
    roles = {True: "assistant", False: "user"}
    return tuple({"role": roles[w.startswith(">")], "content": w.lstrip(">")} for w in words)


def script(name: str, *words: str, dataset: str = "d") -> Prompt:
    return Prompt(name, dataset, "f", said(*words))


def asked(text: str, dataset: str = "d") -> Prompt:
    return script(text, text, dataset=dataset)


def level(*replies: Reply, wall_s: float, cpu_s: float = 4.0, concurrency: int = 1) -> Level:
    tokens = sum(len(r.tokens) for r in replies)
    counted = {"tokens": tokens, "prompt_tokens": 100, "cached_prompt_tokens": 25, "drafts": 2,
               "accepted": 1}  # fmt: skip
    return Level(concurrency, wall_s, replies, parse("") | counted, cpu_s)


def plan(*compared: Setup, by_turns: bool = False, **further: Any) -> Plan:
    levels = ((1, (asked("a short one"),)), (2, (asked("b"), asked("a prompt of many characters"))))
    if by_turns:
        long = script("u", "12345", ">", "the second of these is long")
        levels = ((1, (script("s", "1234", ">", "12"),)), (2, (script("t", "1"), long)))
    return Plan(compared, OPTIONS, levels, (asked("w"), asked("ww")), 6, **further)


def launching(
    habits: dict[str, str], started: list[str]
) -> Callable[[Plan, Setup, int], tuple[list[str], dict[str, str]]]:
    """Starts ``fake_vllm`` for each setup, with its habit, and notes whom."""

    def launch(plan: Plan, setup: Setup, port: int) -> tuple[list[str], dict[str, str]]:
        started.append(setup.name)
        module = "tests.pipelines.lab.bench.serve.fake_vllm"
        command = [sys.executable, "-m", module, str(port), habits.get(setup.name, "")]
        return command, dict(os.environ)

    return launch


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)
