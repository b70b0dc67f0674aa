"""Traces: recorded generations as token ids, read from JSON Lines with any tokenizer.

Text is tokenised once, in batches, and kept in the user's cache under the digests of file and
tokenizer. A line that cannot be used costs one notice that names it; the rest is read.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np

from decoder.contracts.errors import TraceError
from pipelines import machine
from pipelines.replay.tokenise import Ids, Kept, tokenise

FORMAT: Final = "hvd.traces.v1"
"""Part of every cache key: raised when what is kept, or how text is cut, changes."""
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

    def leave_out(self, reason: str, where: str, why: str) -> None:
        """Note that the line at ``where`` (file:line) was not used, or not all of it."""
        self.notices.append(Notice(reason, f"{where}: {why}."))


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
        progress: called with bytes read and bytes in all while text is tokenised.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}.") from error
    key = hashlib.sha256(data + tokenizer_digest(tokenizer).encode() + FORMAT.encode()).hexdigest()
    place = cache_directory() / f"{key[:32]}.npz"
    kept = _load(place)
    if kept is None:
        kept = tokenise(data, path, tokenizer, progress)
        _save(kept, place)
    reading = Reading(notices=[Notice(*n) for n in kept.notices])
    long: dict[int, int] = {}
    for begin, middle, end, line, allowed, session in kept.turns.tolist():
        if end - begin > context:
            long[line] = long.get(line, 0) + 1
            continue
        accepted = kept.accepted[middle:end]
        reading.traces.append(
            Trace(
                kept.sessions[session],
                kept.tokens[begin:middle],
                kept.tokens[middle:end],
                path.stem,
                _allowed(allowed, end - middle),
                accepted if len(accepted) and accepted[0] >= 0 else None,
            )
        )
    for line, count in long.items():
        what = "prompt and output are" if count == 1 else f"{count} prompts with their outputs are"
        reading.leave_out("long", f"{path}:{line}", f"{what} longer than the context, {context}")
    return reading


def _allowed(stated: int, made: int) -> int:
    """Tokens the request might have made; where it is not stated, a round number above ``made``."""
    if stated:
        return max(stated, made)
    return ALLOWED << max(0, (made // ALLOWED).bit_length())


def cache_directory() -> Path:
    """Where tokenised files are kept; safe to delete."""
    return machine.cache_directory() / "traces"


def tokenizer_digest(tokenizer: Any) -> str:
    """Hex digest of vocabulary, rules and chat template; the same for equal tokenizers."""
    if tokenizer is None:
        return "ids"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    text = f"{rules}{tokenizer.chat_template!r}{tokenizer.eos_token}"
    return hashlib.sha256(text.encode()).hexdigest()


def _load(place: Path) -> Kept | None:
    try:
        with place.open("rb") as file, np.load(file, allow_pickle=False) as held:
            text = json.loads(held["text"].tobytes())
            arrays = held["tokens"], held["accepted"], held["turns"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None  # not there, or cut short by a full disk: made anew
    return Kept(*arrays, text["sessions"], text["notices"])


def _save(kept: Kept, place: Path) -> None:
    text = json.dumps({"sessions": kept.sessions, "notices": kept.notices}).encode()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            np.savez(
                file,
                tokens=kept.tokens,
                accepted=kept.accepted,
                turns=kept.turns,
                text=np.frombuffer(text, np.uint8),
            )
        Path(file.name).replace(place)
    except OSError:
        return  # a cache that cannot be written makes the next run slower, not this one wrong
