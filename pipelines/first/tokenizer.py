"""A tokenizer that no policy was made with, trained on the texts at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pipelines.replay.messages import conversation

CHARACTERS: Final = 2_000_000
"""Of each file, from its beginning: what merges are learned from."""
END: Final = "<|end|>"


def trained_tokenizer(files: Sequence[Path], size: int) -> Any:
    """A byte-level BPE of ``size`` entries, without a chat template, that has read ``files``.

    The same files give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text for file in files for text in _texts(file)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def _texts(file: Path) -> Iterator[str]:
    left = CHARACTERS
    with file.open("rb") as lines:
        for line in lines:
            try:
                messages, _ = conversation(json.loads(line))
            except (ValueError, TypeError, AttributeError):
                continue  # read() tells of lines that hold no text
            for message in messages:
                yield message["content"][:left]
                left -= len(message["content"])
                if left <= 0:
                    return
