"""Checkpoints that benchmarks decode with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer, a drafter, a policy and two prompt files, one with faults."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from decoder.contracts.features import NUM_FEATURES
    from decoder.drafting.eagle3 import save_head
    from decoder.policy.probes import to_bytes
    from tests.engines.tiny import VOCABULARY, learned_policy, tiny_head, tiny_target

    folder = tmp_path_factory.mktemp("bench")
    tiny_target(3).save_pretrained(folder / "model")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=None, unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    save_head(tiny_head(3), folder / "drafter")
    (folder / "policy.safetensors").write_bytes(
        to_bytes(learned_policy().with_probes(np.zeros((1, NUM_FEATURES), np.float32)))
    )
    prompts = folder / "prompts"
    prompts.mkdir()
    texts = ["w3 w4 w5 w6 " * 4, "w7 w8 w7 w9 " * 3, "w10 w11 w3 " * 5]
    lines = [_line(f"good/{i}", text) for i, text in enumerate(texts)]
    (prompts / "good.jsonl").write_text("\n".join(lines) + "\n")
    long = _line("faulty/long", "w3 w4 " * 100)
    (prompts / "faulty.jsonl").write_text("{broken\n" + long + "\n" + _line("faulty/ok", "w5"))
    return folder


def _line(name: str, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"id": name, "family": "code", "messages": messages})
