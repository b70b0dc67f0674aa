"""The run itself, on models of a few thousand weights: every method of the reference engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.contracts.errors import EngineError, ModelError, SettingsError
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.session import Session
from decoder.settings import WorkerSettings
from pipelines.lab.bench import methods
from pipelines.lab.bench.decode import run
from pipelines.lab.bench.metrics import Results
from pipelines.lab.bench.options import DecodeOptions
from pipelines.prompts import Prompt, PromptSet
from tests.engines.tiny import VOCABULARY, learned_policy, tiny_engine

WORDS = "abcdefghijkl"
POLICIES = {methods.SHIPPED: learned_policy(), "paper": replace(learned_policy(), threshold=6.0)}


class WordTokenizer:
    """One letter, one token of the tiny models; the template opens and closes with an 'a'."""

    chat_template = "a template"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [WORDS.index(c) for c in text if c in WORDS]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        inner = [i for m in messages for i in self(m["content"])["input_ids"]]
        return [0, *inner, 0]


@pytest.fixture(scope="module")
def engine() -> ReferenceEngine:
    torch.set_num_threads(1)
    made = tiny_engine(3)
    assert len(WORDS) == VOCABULARY
    made.tokenizer = WordTokenizer()
    return made


def prompts_of(name: str, *texts: str) -> PromptSet:
    made = tuple(
        Prompt(f"{name}/{i}", name, "code", ({"role": "user", "content": t},))
        for i, t in enumerate(texts)
    )
    return PromptSet(name, "code", made)


SETS = [
    prompts_of("one", "abcabcabdabcabc", "ddeeffddeeff", "ghghghgh", "kjihkjih"),
    prompts_of("two", "lalalalak", "abababc"),
]


def decoded(
    engine: ReferenceEngine,
    wanted: tuple[str, ...],
    sets: list[PromptSet] = SETS,
    seen: list[str] | None = None,
    **selected: Any,
) -> Results:
    made = methods.build(wanted, POLICIES, has_drafter=True, model_len=4)
    selection = DecodeOptions(max_tokens=40, **selected)
    tick = ([] if seen is None else seen).append
    return run(engine, made, sets, selection, Results({"methods": list(wanted)}), tick)


def test_methods_take_turns_and_datasets_do_as_well(engine: ReferenceEngine) -> None:
    seen: list[str] = []
    decoded(engine, ("greedy", "suffix"), seen=seen, limit=2, warmup=0)
    assert seen == [
        "one: greedy", "one: suffix", "two: suffix", "two: greedy",
        "one: suffix", "one: greedy", "two: greedy", "two: suffix",
    ]  # fmt: skip


def test_warm_up_prompts_fill_the_caches_and_are_not_measured(engine: ReferenceEngine) -> None:
    """The spare prompt is the measured one again: warmed up, its output is in the cache."""
    twins = [prompts_of("one", "abcdefgh", "abcdefgh")]
    runs = [decoded(engine, ("greedy", "suffix"), twins, limit=1, warmup=n) for n in (0, 1)]
    cold, warm = ([*each.prompts.values()] for each in runs)
    assert len(warm) == 1
    assert len(warm[0].outcomes["suffix"].cycles) < len(cold[0].outcomes["suffix"].cycles)


def test_a_prompt_one_method_fails_on_is_left_out_for_all(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Session.generate

    def failing(self: Session, prompt: list[int], *rest: Any, **named: Any) -> Any:
        if self.router.cache is not None and prompt == [0, 3, 3, 4, 4, 5, 5, 3, 3, 4, 4, 5, 5, 0]:
            raise EngineError("no")
        return real(self, prompt, *rest, **named)

    monkeypatch.setattr(Session, "generate", failing)
    found = decoded(engine, ("greedy", "suffix"), SETS[:1], limit=3, warmup=0)
    assert [key.prompt for key in found.prompts] == ["one/0", "one/2"]
    assert found.problems == ["one: prompt one/1 left out, suffix failed: no"]


def test_ctrl_c_keeps_what_is_there(engine: ReferenceEngine) -> None:
    wanted = ("greedy", "suffix")
    whole = decoded(engine, wanted, limit=2, warmup=0)

    class Stopping(list[str]):
        def append(self, what: str) -> None:
            super().append(what)
            if len(self) == 6:  # in the middle of the third prompt
                raise KeyboardInterrupt

    first = decoded(engine, wanted, seen=Stopping(), limit=2, warmup=0)
    assert first.interrupted and list(first.prompts) == list(whole.prompts)[:2]


def test_names_carry_parameters_and_baselines_are_shown_the_papers_drafts() -> None:
    wanted = ("suffix", "frequency:4.5@0.5", "arctic", "arctic:3", "hybrid", "hybrid:paper@2")
    made = methods.build(wanted, POLICIES, has_drafter=True, model_len=4)
    assert tuple(m.name for m in made) == wanted
    assert [m.policy.threshold for m in made] == [
        0, 4.5, 4, 3, POLICIES[""].threshold, 6,
    ]  # fmt: skip
    worker = WorkerSettings(suffix_max_factor=3.0)
    assert [m.drafting(worker).suffix_max_factor for m in made] == [1.0, 0.5, 1.0, 1.0, 3.0, 2.0]
    assert methods.build(["eagle3:2"], {}, True, 4)[0].model_limit == 2
    assert methods.names("suffix,greedy,suffix") == ("suffix", "greedy")
    files = methods.policy_files(["a.safetensors", "paper=b=c"])
    assert files == {"": Path("a.safetensors"), "paper": Path("b=c")}
    for asked, has_drafter, said in (
        ("greedy,gredy,frequency:3", True, "no method gredy: there are greedy, "),
        ("frequency:many@2", True, "'frequency:many@2': behind ':'"),
        ("hybrid:paper", True, "a label of --policy"),
        ("suffix@nan", True, "behind '@' the factor"),
        ("greedy,eagle3,frequency", False, "eagle3, frequency need a drafter"),
    ):
        with pytest.raises((SettingsError, ModelError), match=said):
            methods.build(methods.names(asked), {}, has_drafter, 4)
