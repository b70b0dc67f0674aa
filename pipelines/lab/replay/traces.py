"""Traces: recorded generations as token ids, read from JSON Lines with any tokenizer.

Text is tokenised in batches, and turns of one dialogue once. A line that cannot be used costs one
notice that names it; the rest is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import TraceError
from pipelines.lab.replay.messages import Script, conversation, scripts

Ids = NDArray[np.int32]

BATCH: Final = 256
"""Pieces of text given to the tokenizer at once."""
ALLOWED: Final = 1024
"""Output tokens a request may make where the recording does not say."""


@dataclass(frozen=True)
class Trace:
    """One recorded generation as token ids. ``session`` keeps turns of one dialogue together."""

    session: str
    prompt: Sequence[int] | Ids
    output: Sequence[int] | Ids
    workload: str = ""
    allowed: int = ALLOWED
    """Output tokens the request might have made. Never the recorded length itself: a feature or a
    draft cut by it would tell the label where the output ends."""
    model_accepted: Sequence[int] | Ids | None = None
    """At each output position, the model draft's accepted length there; None where not recorded."""
    licence: str = ""
    """What the line names as ``license``."""


@dataclass(frozen=True)
class Notice:
    """Something left out: where, why in a word (for counting), and one sentence."""

    reason: str
    text: str


@dataclass
class Reading:
    """What a file held."""

    traces: list[Trace] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


def read(
    path: Path,
    tokenizer: Any,
    context: int = 1 << 20,
    progress: Callable[[int, int], None] | None = None,
) -> Reading:
    """Every usable generation of ``path``, in its order; ``workload`` is the file's stem.

    Args:
        tokenizer: of Hugging Face; None if the file holds token ids only.
        context: tokens that prompt and output may have together.
        progress: called with bytes read and bytes in all.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}.") from error
    builder, done = _Builder(path, tokenizer, context), 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        done += len(line) + 1
        if not line.strip():
            continue
        builder.add_line(number, line)
        if sum(len(s.pieces) for s, *_ in builder.waiting) >= BATCH:
            builder.flush()
            if progress is not None:
                progress(min(done, len(data)), len(data))
    return builder.reading()


class _Builder:
    """Collects scripts and token records of a file, and tokenises them in batches."""

    def __init__(self, path: Path, tokenizer: Any, context: int) -> None:
        self.path, self.tokenizer, self.context = path, tokenizer, context
        self.special = frozenset(tokenizer.all_special_ids) if tokenizer else frozenset()
        self.waiting: list[tuple[Script, Trace, int]] = []
        self.found: list[tuple[int, Trace]] = []
        self.long = Counter[int]()
        self.notices: list[Notice] = []

    def leave_out(self, reason: str, line: int, why: str) -> None:
        """Note that a line was not used, or not all of it. Mutates."""
        self.notices.append(Notice(reason, f"{self.path}:{line}: {why}."))

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
        prompt, output = record.get("prompt"), record.get("output")
        told = Trace(
            str(record.get("session") or record.get("id") or line), (), (), self.path.stem,
            int(record.get("max_tokens") or 0), licence=str(record.get("license") or ""),
        )  # fmt: skip
        if _are_ids(prompt) and _are_ids(output):
            self._add_ids(line, told, record)
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
        self.waiting += [(script, told, line) for script in made]

    def _add_ids(self, line: int, told: Trace, record: dict[str, Any]) -> None:
        prompt, output = record["prompt"], record["output"]
        size = len(self.tokenizer) if self.tokenizer is not None else 1 << 31
        if max([*prompt, *output], default=0) >= size or min([*prompt, *output], default=0) < 0:
            raise ValueError(f"a token id is outside the vocabulary of {size}")
        if not output or not prompt:
            self.leave_out("empty", line, f"left out, an empty {'output' if prompt else 'prompt'}")
            return
        accepted = record.get("model_accepted")
        if accepted is not None:
            if not _are_ids(accepted) or len(accepted) != len(output):
                raise ValueError("model_accepted needs one number for each output token")
            accepted = np.array(accepted, np.int32)
        tokens = np.array([*prompt, *output], np.int32)
        self._keep(line, replace(told, model_accepted=accepted), tokens, len(prompt), len(tokens))

    def _keep(self, line: int, told: Trace, tokens: Ids, middle: int, end: int) -> None:
        if end > self.context:
            self.long[line] += 1
            return
        made = end - middle
        # Where it is not stated, a round number above what was made.
        round_up = ALLOWED << max(0, (made // ALLOWED).bit_length())
        allowed = max(told.allowed, made) if told.allowed else round_up
        output = tokens[middle:end]
        self.found.append(
            (line, replace(told, prompt=tokens[:middle], output=output, allowed=allowed))
        )

    def flush(self) -> None:
        """Tokenise what waits. Mutates."""
        first = [s.pieces[0] for s, *_ in self.waiting if s.whole]
        rest = [p for s, *_ in self.waiting for p in s.pieces[s.whole :]]
        begun, going = iter(self._ids(first, True)), iter(self._ids(rest, False))
        for script, told, line in self.waiting:
            ids = [next(begun if script.whole and not i else going) for i in
                   range(len(script.pieces))]  # fmt: skip
            ends = np.cumsum([0, *map(len, ids)]).tolist()
            tokens = np.array([t for piece in ids for t in piece], np.int32)
            for i in script.outputs:
                # The end of turn was generated too; the template or the script wrote it.
                closed = i + 1 < len(ids) and ids[i + 1] and ids[i + 1][0] in self.special
                middle, end = ends[i], ends[i + 1] + bool(closed)
                if script.pieces[i].strip() and middle > 0:
                    self._keep(line, told, tokens, middle, end)
        self.waiting = []

    def reading(self) -> Reading:
        """All of it, in the order of the file: ids did not wait for a batch, text did."""
        self.flush()
        for line, count in sorted(self.long.items()):
            what = "prompt and output are"
            if count > 1:
                what = f"{count} prompts with their outputs are"
            self.leave_out("long", line, f"{what} longer than the context, {self.context}")
        self.found.sort(key=lambda each: each[0])
        return Reading([trace for _, trace in self.found], self.notices)

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


def files_of(paths: Sequence[Path]) -> list[Path]:
    """``paths`` with each directory replaced by its trace files, by name.

    Raises:
        TraceError: a directory holds none.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise TraceError(f"no *.jsonl in {path}: name a folder of trace files, or files.")
        found += inside
    return found
