"""A trace file's lines as tokens: text in batches, turns of one dialogue in one array."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelines.replay.messages import Script, conversation, scripts

Ids = NDArray[np.int32]

BATCH: Final = 256
"""Pieces of text given to the tokenizer at once."""


@dataclass
class Kept:
    """A file's generations in one array of tokens; a script's turns share its tokens.

    A turn is [begin of script, end of prompt, end of output, line, output tokens allowed
    (0: not stated), index of session].
    """

    tokens: Ids
    accepted: Ids  # model arm's accepted length beside each token, -1 where unknown
    turns: NDArray[np.int64]
    sessions: list[str]
    notices: list[list[str]]  # reason in a word, sentence


def tokenise(
    data: bytes, path: Path, tokenizer: Any, progress: Callable[[int, int], None] | None
) -> Kept:
    """Every generation of the file whose bytes are ``data``; ``path`` is for the notices.

    Args:
        tokenizer: of Hugging Face; None if the file holds token ids only.
        progress: called with bytes read and bytes in all.
    """
    builder = Builder(path, tokenizer)
    read = 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        read += len(line) + 1
        if not line.strip():
            continue
        builder.add_line(number, line)
        if sum(len(s.pieces) for s, *_ in builder.waiting) >= BATCH:
            builder.flush()
            if progress is not None:
                progress(min(read, len(data)), len(data))
    builder.flush()
    none = np.zeros(0, np.int32)
    turns = np.array(builder.turns, np.int64).reshape(-1, 6)
    return Kept(
        np.concatenate([none, *builder.tokens]),
        np.concatenate([none, *builder.accepted]),
        turns[np.argsort(turns[:, 3], kind="stable")],  # ids did not wait for a batch, text did
        list(builder.sessions),
        builder.notices,
    )


def session_of(record: dict[str, Any], line: int) -> str:
    """What must not be parted between training and test: names the session of a line."""
    return str(record.get("session") or record.get("id") or line)


class Builder:
    """Collects scripts and token records of a file, and tokenises them in batches."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.special = frozenset(tokenizer.all_special_ids) if tokenizer else frozenset()
        self.waiting: list[tuple[Script, str, int, int]] = []
        self.tokens: list[Ids] = []
        self.accepted: list[Ids] = []
        self.length = 0
        self.turns: list[tuple[int, ...]] = []
        self.sessions: dict[str, int] = {}
        self.notices: list[list[str]] = []

    def leave_out(self, reason: str, line: int, why: str) -> None:
        """Note what was not used. Mutates."""
        self.notices.append([reason, f"{self.path}:{line}: {why}."])

    def add_line(self, line: int, text: bytes) -> None:
        """Take one line of the file, or note why not. Mutates."""
        try:
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
            self._add(line, record)
        except UnicodeDecodeError:
            self.leave_out("malformed", line, "left out, not UTF-8")
        except json.JSONDecodeError as error:
            self.leave_out("malformed", line, f"left out, not JSON ({error.msg})")
        except (ValueError, TypeError, AttributeError) as error:
            self.leave_out("malformed", line, f"left out, {error}")

    def _add(self, line: int, record: dict[str, Any]) -> None:
        session = session_of(record, line)
        allowed = int(record.get("max_tokens") or 0)
        prompt, output = record.get("prompt"), record.get("output")
        if _are_ids(prompt) and _are_ids(output):
            self._add_ids(line, session, allowed, record)
            return
        if self.tokenizer is None:
            raise ValueError("not a prompt and an output in token ids")
        if isinstance(prompt, str) and isinstance(output, str):
            made = [Script([prompt, output, self.tokenizer.eos_token or ""], [1], whole=True)]
        else:
            messages, generations = conversation(record)
            made = scripts(messages, generations, self.tokenizer)
        empty = sum(not s.pieces[i].strip() for s in made for i in s.outputs)
        if empty or not any(s.outputs for s in made):
            what = f"{empty} empty outputs" if empty > 1 else "an empty output"
            self.leave_out("empty", line, f"left out {what}" if empty else "no output to replay")
        self.waiting += [(script, session, allowed, line) for script in made]

    def _add_ids(self, line: int, session: str, allowed: int, record: dict[str, Any]) -> None:
        prompt, output = record["prompt"], record["output"]
        size = len(self.tokenizer) if self.tokenizer is not None else 1 << 31
        if max([*prompt, *output], default=0) >= size or min([*prompt, *output], default=0) < 0:
            raise ValueError(f"a token id is outside the vocabulary of {size}")
        if not output or not prompt:
            self.leave_out("empty", line, f"left out, an empty {'output' if prompt else 'prompt'}")
            return
        accepted = record.get("model_accepted")
        if accepted is None:
            accepted = [-1] * len(output)
        elif not _are_ids(accepted) or len(accepted) != len(output):
            raise ValueError("model_accepted needs one number for each output token")
        self._append(np.array(prompt, np.int32), None)
        self._append(np.array(output, np.int32), np.array(accepted, np.int32))
        begin = self.length - len(prompt) - len(output)
        turn = (begin, begin + len(prompt), self.length, line, allowed)
        self.turns.append((*turn, self.sessions.setdefault(session, len(self.sessions))))

    def flush(self) -> None:
        """Tokenise what waits. Mutates."""
        first = [s.pieces[0] for s, *_ in self.waiting if s.whole]
        rest = [p for s, *_ in self.waiting for p in s.pieces[s.whole :]]
        begun, going = iter(self._ids(first, True)), iter(self._ids(rest, False))
        for script, session, allowed, line in self.waiting:
            ids = [next(begun if script.whole and not i else going) for i in
                   range(len(script.pieces))]  # fmt: skip
            ends = np.cumsum([0, *map(len, ids)]) + self.length
            begin = self.length
            self._append(np.array([t for piece in ids for t in piece], np.int32), None)
            number = self.sessions.setdefault(session, len(self.sessions))
            for i in script.outputs:
                # The end of turn was generated too; the template or the script wrote it.
                closed = i + 1 < len(ids) and ids[i + 1] and ids[i + 1][0] in self.special
                middle, end = int(ends[i]), int(ends[i + 1]) + bool(closed)
                if script.pieces[i].strip() and middle > begin:
                    self.turns.append((begin, middle, end, line, allowed, number))
        self.waiting = []

    def _append(self, tokens: Ids, accepted: Ids | None) -> None:
        self.tokens.append(tokens)
        self.accepted.append(np.full(len(tokens), -1, np.int32) if accepted is None else accepted)
        self.length += len(tokens)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        if not texts:
            return []
        found = self.tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = found["input_ids"]
        return ids


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)
