"""A recording says of every position what the engine itself would have seen there."""

from __future__ import annotations

import random

import pytest
import torch

from decoder.contracts.errors import EngineError
from decoder.engines.reference.engine import ReferenceEngine
from pipelines.lab.drafter import chains
from pipelines.lab.drafter.chains import record
from pipelines.lab.drafter.head import Drafter
from pipelines.replay.rivals import method
from tests.engines.tiny import Family, tiny_engine, tiny_prompt


def chains_one_by_one(engine: ReferenceEngine, prompt: list[int], output: list[int]) -> list[int]:
    """The definition: draft anew at every position and compare with the output."""
    k, found = engine.settings.model_draft_tokens, []
    for position in range(len(output)):
        text = [*prompt, *output[:position]]
        arm = engine.drafter(4)
        assert arm is not None
        arm.follow(text[1:], engine.target.run(text[:-1]).aux)
        drafted = arm.draft(k)
        rest = output[position:]
        found.append(next((i for i, t in enumerate(drafted) if rest[i : i + 1] != [t]), k))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("seed", range(3))
def test_every_position_equals_drafting_there(family: Family, seed: int) -> None:
    engine, prompt = tiny_engine(seed, family), tiny_prompt(seed)
    output = method("greedy").session(engine).generate(prompt, 40).tokens
    recorded = record(engine, prompt, output)
    assert len(recorded) == 40
    with torch.inference_mode():
        assert recorded == chains_one_by_one(engine, prompt, output)


def test_chains_are_run_in_blocks_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = tiny_engine(0), tiny_prompt(0)
    output = method("greedy").session(engine).generate(prompt, 60).tokens
    whole = record(engine, prompt, output)
    assert sum(whole) > 5
    monkeypatch.setattr(chains, "ROWS", 7)
    assert record(engine, prompt, output) == whole


def test_short_texts() -> None:
    engine = tiny_engine(1)
    assert record(engine, [3, 4], []) == []
    assert record(engine, [3], [5]) == [0]
    alone = record(engine, [3], [5, 6, 7])
    assert len(alone) == 3 and alone[0] == 0
    with torch.inference_mode():
        assert alone[1:] == chains_one_by_one(engine, [3, 5], [6, 7])
    with pytest.raises(EngineError, match="cannot be recorded"):
        record(engine, [1] * 100, [2] * 100)
    engine.head = None
    with pytest.raises(EngineError, match="needs a drafter"):
        record(engine, [3, 4], [5])


@torch.inference_mode()
def test_the_drafter_keeps_step_whenever_it_is_asked() -> None:
    """Following in pieces, drafting now and then, equals following everything at once."""
    engine, rng = tiny_engine(0), random.Random(0)
    text = tiny_prompt(0, 60)
    aux = engine.target.run(text[:-1]).aux
    arm = engine.drafter(4)
    assert arm is not None and engine.head is not None
    at = 0
    while at < len(aux):
        step = rng.randint(1, 6)
        arm.follow(text[at + 1 : at + 1 + step], aux[at : at + step])
        at += step
        if rng.random() < 0.4:
            arm.draft(rng.randint(1, 9))
    whole = Drafter(engine.head, engine.target.embedding, 4)
    whole.follow(text[1:], aux)
    for mine, theirs in zip(arm.catch_up()[1], whole.catch_up()[1], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert arm.draft(4) == whole.draft(4)
