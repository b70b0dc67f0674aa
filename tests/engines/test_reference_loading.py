"""What the reference engine loads, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from decoder.contracts.errors import EngineError, ModelError
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.session import Sampling
from pipelines.lab.drafter.save import save_head
from pipelines.lab.reference import load_engine
from pipelines.replay.rivals import method
from tests.engines.tiny import tiny_engine, tiny_head, tiny_prompt, tiny_target


def test_invalid_requests_are_refused_with_a_reason() -> None:
    engine = tiny_engine(0, max_model_len=40)
    session = method("suffix").session(engine)
    with pytest.raises(EngineError, match="prompt of 0 tokens"):
        session.generate([], 4)
    with pytest.raises(EngineError, match="do not fit the context of 40"):
        session.generate(tiny_prompt(0, 40), 4)
    with pytest.raises(EngineError, match="at least one token"):
        session.generate([1, 2], 0)
    with pytest.raises(EngineError, match="above 0"):
        Sampling(0.0)
    with pytest.raises(EngineError, match=r"no method 'medusa'.*greedy"):
        method("medusa")
    with pytest.raises(EngineError, match="learned policy"):
        method("hybrid")
    engine.head = None
    with pytest.raises(EngineError, match="load a drafter"):
        method("eagle3").session(engine)


def test_missing_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no target model can be read from .*absent"):
        load_engine(tmp_path / "absent")


def test_a_checkpoint_directory_is_loaded_with_its_ends_of_text(tmp_path: Path) -> None:
    target = tiny_target(2)
    target.generation_config.eos_token_id = [3, 8]
    target.save_pretrained(tmp_path / "target")
    vocabulary = {f"t{i}": i for i in range(11)} | {"[": 11}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t4").save_pretrained(
        tmp_path / "target"
    )
    save_head(tiny_head(2), tmp_path / "head", torch.float32)
    engine = load_engine(tmp_path / "target", tmp_path / "head", max_model_len=99)
    assert engine.stop_ids == {3, 4, 8}
    assert engine.max_model_len == 99
    assert engine.token_classes.shape[0] == 12 and engine.token_classes[11].any()
    made = method("eagle3").session(engine).generate(tiny_prompt(2), 40)
    plain = method("greedy").session(engine)
    free = plain.generate(tiny_prompt(2), 40, stop_ids=frozenset()).tokens
    ends = [i for i, token in enumerate(free) if token in engine.stop_ids]
    assert made.tokens == free[: ends[0] + 1]
    with pytest.raises(ModelError, match="cannot be fetched"):
        load_engine(tmp_path / "target", tmp_path / "absent")


def test_a_target_without_rollback_is_refused() -> None:
    config = Qwen3Config(
        vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, use_sliding_window=True,
        sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match="full attention"):
        ReferenceEngine(Qwen3ForCausalLM(config))
