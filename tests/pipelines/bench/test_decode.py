"""The run itself, on models of a few thousand weights: every method of the reference engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.contracts.errors import EngineError, ModelError, SettingsError
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.session import Session
from decoder.settings import WorkerSettings
from pipelines.bench import methods
from pipelines.bench.decode.run import Plan, run
from pipelines.bench.metrics import differing, summary
from pipelines.bench.options import Selection
from pipelines.bench.results import Results, Store
from pipelines.prompts import Prompt, PromptSet
from tests.engines.tiny import VOCABULARY, learned_policy, tiny_engine

WORDS = "abcdefghijkl"
ALL = [
    "greedy", "eagle3", "eagle3-tree", "suffix", "frequency:1", "arctic", "hybrid",
    "hybrid-tree", "oracle",
]  # fmt: skip
POLICIES = {methods.SHIPPED: learned_policy()}


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
    tmp_path: Path,
    wanted: list[str],
    sets: list[PromptSet] = SETS,
    seen: list[str] | None = None,
    minutes: float | None = None,
    **plan: Any,
) -> Results:
    made = methods.build(wanted, POLICIES, has_drafter=True, model_len=4)
    selection = Selection(**plan)
    settings = {"methods": wanted, "templates": list(selection.templates)}
    store = Store(tmp_path / "generations.jsonl", settings)
    ticks = seen if seen is not None else []
    return run(engine, sets, Plan(made, selection, 40, minutes), store, ticks.append)


def test_every_method_gives_greedys_output_on_every_prompt(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    found = decoded(engine, tmp_path, ALL, limit=3)
    assert len(found.whole()) == 5
    assert differing(found) == []
    made = summary(found)["records"]
    assert Counter(r["dataset"] for r in made) == {"one": len(ALL), "two": len(ALL)}
    assert all(r["exact"] and r["tokens"] for r in made)
    by_method = {r["method"]: r for r in made if r["dataset"] == "one"}
    assert by_method["greedy"]["cycles_per_1k"] == pytest.approx(1000.0)
    assert by_method["eagle3"]["model_share"] > 0.9
    assert by_method["suffix"]["cache_share"] > 0
    assert by_method["suffix"]["drafts"] > 0
    kept = [o for by in found.whole().values() for o in by.values() if o.method != "oracle"]
    for outcome in kept:
        assert len(outcome.drafts) == sum(c.cache_len > 0 for c in outcome.cycles)
        verified = sum(c.arm == "model" and c.verified > 0 for c in outcome.cycles)
        assert len(outcome.model_drafts) == verified
    for single in ("eagle3", "suffix"):
        assert by_method["oracle"]["cycles_per_1k"] <= by_method[single]["cycles_per_1k"]
    again = Store(tmp_path / "generations.jsonl", found.settings).results
    assert again.whole() == found.whole()


def test_methods_take_turns_and_datasets_do_as_well(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    seen: list[str] = []
    decoded(engine, tmp_path, ["greedy", "suffix"], seen=seen, limit=2, warmup=0)
    assert seen == [
        "one: greedy", "one: suffix", "two: suffix", "two: greedy",
        "one: suffix", "one: greedy", "two: greedy", "two: suffix",
    ]  # fmt: skip


def test_warm_up_prompts_fill_the_caches_and_are_not_measured(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    """The spare prompt is the measured one again: warmed up, its output is in the cache."""
    twins = [prompts_of("one", "abcdefgh", "abcdefgh")]
    cold = decoded(engine, tmp_path / "cold", ["greedy", "suffix"], twins, limit=1, warmup=0)
    warm = decoded(engine, tmp_path / "warm", ["greedy", "suffix"], twins, limit=1, warmup=1)
    assert len(warm.whole()) == 1
    cycles = [len(f.whole()["one", "chat", "one/0"]["suffix"].cycles) for f in (cold, warm)]
    assert cycles[1] < cycles[0]


def test_a_prompt_that_does_not_fit_is_named_and_the_next_one_taken(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    sets = [prompts_of("one", "ab" * 200, "abc", "xyz")]
    found = decoded(engine, tmp_path, ["greedy"], sets, limit=2, warmup=0)
    assert [key[2] for key in found.whole()] == ["one/1", "one/2"]
    assert found.problems == [
        "one: prompt one/0 skipped: its 402 tokens are more than the 120 there is room for."
    ]
    cut = decoded(
        engine, tmp_path / "cut", ["greedy"], sets, limit=1, warmup=0, too_long="truncate",
        max_prompt_tokens=20,
    )  # fmt: skip
    facts = cut.prompts["one", "chat", "one/0"]
    assert (facts.tokens, facts.cut) == (20, 382)


def test_a_prompt_one_method_fails_on_is_left_out_for_all(
    engine: ReferenceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Session.generate

    def failing(self: Session, prompt: list[int], *rest: Any, **named: Any) -> Any:
        if self.method.name == "suffix" and prompt == [0, 3, 3, 4, 4, 5, 5, 3, 3, 4, 4, 5, 5, 0]:
            raise EngineError("no")
        return real(self, prompt, *rest, **named)

    monkeypatch.setattr(Session, "generate", failing)
    found = decoded(engine, tmp_path, ["greedy", "suffix"], SETS[:1], limit=3, warmup=0)
    assert [key[2] for key in found.outcomes] == ["one/0", "one/2"]
    assert found.problems == ["one: prompt one/1 left out, suffix failed: no"]


def test_ctrl_c_keeps_what_is_there_and_the_next_run_goes_on(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    wanted = ["greedy", "suffix", "hybrid"]
    whole = decoded(engine, tmp_path / "whole", wanted, limit=2, warmup=1)
    asked: list[str] = []

    class Stopping(list[str]):
        def append(self, what: str) -> None:
            asked.append(what)
            if len(asked) == 8:  # in the middle of the third prompt
                raise KeyboardInterrupt

    first = decoded(engine, tmp_path, wanted, seen=Stopping(), limit=2, warmup=1)
    assert first.interrupted
    assert len(first.whole()) == 2
    seen: list[str] = []
    second = decoded(engine, tmp_path, wanted, seen=seen, limit=2, warmup=1)
    assert not second.interrupted
    assert len(seen) == 6
    for key, by_method in whole.whole().items():
        for name, outcome in by_method.items():
            again = second.whole()[key][name]
            assert again.tokens == outcome.tokens
            if name == "suffix":
                assert [c.cache_len for c in again.cycles] == [
                    c.cache_len for c in outcome.cycles
                ], "the resumed session's cache is not what it would have been"


def test_time_that_is_up_ends_the_run_between_prompts(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    found = decoded(engine, tmp_path, ["greedy"], limit=2, minutes=1e-9)
    assert found.whole() == {}
    assert found.out_of_time
    assert not found.interrupted


def test_templates_are_measured_beside_each_other(engine: ReferenceEngine, tmp_path: Path) -> None:
    found = decoded(engine, tmp_path, ["greedy"], limit=1, template="both")
    tokens = {f.key[:2]: f.tokens for f in found.prompts.values()}
    assert tokens["one", "chat"] == tokens["one", "none"] + 2
    assert {r["template"] for r in summary(found)["records"]} == {"chat", "none"}


def test_names_of_methods_carry_their_parameters() -> None:
    paper = replace(learned_policy(), threshold=6.0)
    policies = {**POLICIES, "paper": paper}
    made = methods.build(
        ["frequency:4.5", "arctic", "arctic:3", "hybrid:paper", "hybrid:1.5"],
        policies, has_drafter=True, model_len=4,
    )  # fmt: skip
    assert [m.name for m in made][:3] == ["frequency:4.5", "arctic", "arctic:3"]
    assert [m.policy.threshold for m in made] == [4.5, 4, 3, 6, 1.5]


def test_baselines_are_shown_the_papers_drafts_and_the_hybrid_the_workers() -> None:
    worker = WorkerSettings(suffix_max_factor=3.0)
    names = ["suffix", "frequency", "arctic", "hybrid", "suffix@4", "frequency:4@0.5"]
    made = methods.build(names, POLICIES, has_drafter=True, model_len=4)
    factors = [m.drafting(worker).suffix_max_factor for m in made]
    assert factors == [1.0, 1.0, 1.0, 3.0, 4.0, 0.5]
    assert [m.name for m in made] == names
    assert made[-1].policy.threshold == 4.0


@pytest.mark.parametrize(
    ("wanted", "has_drafter", "error", "said"),
    [
        ("greedy,gredy,frequency:3", True, SettingsError, "no method gredy: there are greedy, "),
        ("frequency:many", True, SettingsError, "'many' is neither a number"),
        ("frequency:many@2", True, SettingsError, "'many' is neither a number"),
        ("suffix@0", True, SettingsError, "is no factor above 0"),
        ("suffix@nan", True, SettingsError, "is no factor above 0"),
        ("suffix@1000", True, SettingsError, "is no factor above 0"),
        ("greedy,eagle3,frequency", False, ModelError, "eagle3, frequency need a drafter"),
        (" , ", True, SettingsError, "names none"),
    ],
)
def test_what_cannot_be_a_method_is_said_in_a_sentence(
    wanted: str, has_drafter: bool, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        methods.build(methods.names(wanted), {}, has_drafter, 4)


def test_names_come_once_and_greedy_where_an_oracle_needs_it() -> None:
    assert methods.names("suffix@2,frequency:4@2") == ["suffix@2", "frequency:4@2"]
    assert methods.names("suffix,oracle,suffix") == ["greedy", "suffix", "oracle"]
    files = methods.policy_files(["a.safetensors", "paper=b=c"])
    assert files == {"": Path("a.safetensors"), "paper": Path("b=c")}
