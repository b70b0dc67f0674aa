"""Recordings and a tokenizer small enough to read, for the tests of replay."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from decoder.contracts.features import TOKEN_CLASSES
from pipelines.lab.replay.traces import Trace

VOCABULARY = 12

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def token_classes() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.random((VOCABULARY, len(TOKEN_CLASSES))) < 0.3).astype(np.float32)


def copying_traces(seed: int, count: int = 6, length: int = 60, **more: Any) -> list[Trace]:
    """Outputs made of a few phrases that also stand in the prompts, so that copying pays."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(1, VOCABULARY) for _ in range(rng.randint(3, 9))] for _ in range(4)]

    def text(size: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < size:
            tokens += rng.choice(phrases) if rng.random() < 0.8 else [rng.randrange(VOCABULARY)]
        return tokens[:size]

    return [Trace(f"s{i}", text(20), text(length), **more) for i in range(count)]


def write_traces(path: Path, seed: int, count: int, length: int) -> Path:
    """Recordings in token ids, a line each."""
    lines = [
        json.dumps({"session": f"{path.stem}{i}", "prompt": t.prompt, "output": t.output})
        for i, t in enumerate(copying_traces(seed, count, length))
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def dialogue(seed: int, turns: int = 4) -> list[Trace]:
    """One session: each prompt is the one before with its output and something new."""
    made: list[Trace] = []
    shown: list[int] = []
    for part in copying_traces(seed, turns, 30):
        shown = [*shown, *part.prompt]
        made.append(Trace("talk", list(shown), list(part.output)))
        shown = [*shown, *part.output]
    return made


def word_tokenizer(template: str | None = CHAT_TEMPLATE) -> Any:
    """One token a word, of the words these tests use; ``<|end|>`` ends a turn."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
    words = ["?", *"abcdefghijklmnop", "red", "blue", "green", "one", "two", "three"]
    vocabulary = {word: i for i, word in enumerate([*marks, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="?", eos_token="<|end|>",
        additional_special_tokens=marks[:4],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer
