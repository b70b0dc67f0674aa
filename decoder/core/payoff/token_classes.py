"""Token classes of each vocabulary entry: a table built once per tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.features import TOKEN_CLASSES

_BRACKETS = frozenset("()[]{}<>")
_DELIMITERS = frozenset(",:;\"'`|/\\=")
_PUNCTUATION = frozenset(".!?-_*#&%$@+~^")
_BLANKS = (" ", "\t", "Ġ", "▁")  # the last two: leading blank in byte-level BPE, SentencePiece
_NEWLINES = ("\n", "\r", "Ċ", "<0x0A>")


def _classes_of(entry: str) -> tuple[bool, ...]:
    body = frozenset(entry)
    flags = {
        "whitespace": entry.startswith(_BLANKS),
        "newline": any(mark in entry for mark in _NEWLINES),
        "bracket": bool(body & _BRACKETS),
        "delimiter": bool(body & _DELIMITERS),
        "punctuation": bool(body & _PUNCTUATION),
        "digit": any(character.isdigit() for character in entry),
    }
    return tuple(flags[name] for name in TOKEN_CLASSES)


def token_class_table(vocabulary: Sequence[str | None]) -> NDArray[np.float32]:
    """Class indicators, float32 [n, classes] of 0 and 1, of the raw entries of a vocabulary, None
    for an id without an entry."""
    return np.array([_classes_of(entry or "") for entry in vocabulary], dtype=np.float32)


def token_classes_of(tokenizer: Any, vocabulary: int = 0) -> NDArray[np.float32]:
    """Table of a Hugging Face tokenizer, padded with zeros to ``vocabulary`` rows: a model may have
    more ids than its tokenizer has entries."""
    entries = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return token_class_table(entries + [None] * (vocabulary - len(entries)))
