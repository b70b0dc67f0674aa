"""Reads recorded generations from JSON Lines. Each line is one JSON object of three kinds:

``{"messages": [...]}``            every message of role ``assistant`` is a generation
``{"prompt": ..., "output": ""}``  one generation; the prompt is a list of messages, or text
``{"prompt": [ids], "output": [ids]}``   one generation in token ids

``session`` (else ``id``) names what must stay together in training or test. Turns of one dialogue
are tokenised once. An unusable line is skipped with a notice that names it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from decoder.contracts.errors import TraceError
from pipelines.prompts import Message
from pipelines.replay.engine import ALLOWED, Ids, Trace

BATCH: Final = 64  # lines between two progress calls


@dataclass
class Reading:
    """The generations of a file, a notice for each line that is unusable in part, and one for each
    that exceeds the context."""

    traces: list[Trace] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)


def read(
    path: Path,
    tokenizer: Any,
    context: int = 1 << 20,
    progress: Callable[[int, int], None] | None = None,
) -> Reading:
    """The usable generations of ``path``, in order; ``workload`` is the file's stem.

    Args:
        tokenizer: of Hugging Face; None if the file holds token ids only.
        context: most tokens of prompt and output together.
        progress: called with bytes read and bytes in all.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}.") from error
    result, done = Reading(), 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        done, long = done + len(line) + 1, 0
        where = f"{path}:{number}:"
        try:
            for trace in _traces(line, path.stem, number, tokenizer) if line.strip() else ():
                if len(trace.prompt) + len(trace.output) > context:
                    long += 1
                else:
                    result.traces.append(trace)
        except UnicodeDecodeError:
            result.notices.append(f"{where} left out, not UTF-8.")
        except json.JSONDecodeError as error:
            result.notices.append(f"{where} left out, not JSON ({error.msg}).")
        except (ValueError, TypeError, AttributeError) as error:
            result.notices.append(f"{where} left out, {error}.")
        if long:
            what = f"{long} prompts with their outputs" if long > 1 else "prompt and output"
            result.too_long.append(f"{where} {what} are longer than the context, {context}.")
        if progress is not None and number % BATCH == 0:
            progress(min(done, len(data)), len(data))
    return result


def _traces(line: bytes, workload: str, number: int, tokenizer: Any) -> Iterator[Trace]:
    """The generations of one line. Raises ValueError, TypeError, AttributeError if the rest of the
    line is unusable."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    template = Trace(
        str(record.get("session") or record.get("id") or number), (), (), workload,
        int(record.get("max_tokens") or 0), licence=str(record.get("license") or ""),
    )  # fmt: skip
    prompt, output = record.get("prompt"), record.get("output")
    if _are_ids(prompt) and _are_ids(output):
        return iter([_of_ids(template, record, tokenizer)])
    if tokenizer is None:
        raise ValueError("not a prompt and an output in token ids")
    if isinstance(prompt, str) and isinstance(output, str):
        parts = [Script([prompt, output, tokenizer.eos_token or ""], [1], whole=True)]
    else:
        parts = scripts(*conversation(record), tokenizer)
    return _of_text(template, parts, tokenizer)


def _cut(template: Trace, tokens: Ids, middle: int, end: int) -> Trace:
    generated = end - middle
    # by default a power of two above the generated length
    round_up = ALLOWED << max(0, (generated // ALLOWED).bit_length())
    allowed = max(template.allowed, generated) if template.allowed else round_up
    return replace(template, prompt=tokens[:middle], output=tokens[middle:end], allowed=allowed)


def _of_text(template: Trace, parts: Sequence[Script], tokenizer: Any) -> Iterator[Trace]:
    if not any(script.outputs for script in parts):
        raise ValueError("no output to replay")
    special, empty = set(tokenizer.all_special_ids), 0
    for script in parts:
        ids = _ids_of(script, tokenizer)
        ends = np.cumsum([0, *map(len, ids)]).tolist()
        tokens = np.array([token for piece in ids for token in piece], np.int32)
        for i in script.outputs:
            # the end of turn was generated too
            closed = i + 1 < len(ids) and ids[i + 1] and ids[i + 1][0] in special
            if not script.pieces[i].strip():
                empty += 1
            elif ends[i]:
                yield _cut(template, tokens, ends[i], ends[i + 1] + bool(closed))
    if empty:
        raise ValueError(f"{empty} empty outputs" if empty > 1 else "an empty output")


def _of_ids(template: Trace, record: dict[str, Any], tokenizer: Any) -> Trace:
    prompt, output = record["prompt"], record["output"]
    size = len(tokenizer) if tokenizer is not None else 1 << 31
    if max([*prompt, *output], default=0) >= size or min([*prompt, *output], default=0) < 0:
        raise ValueError(f"a token id is outside the vocabulary of {size}")
    if not output or not prompt:
        raise ValueError(f"an empty {'output' if prompt else 'prompt'}")
    accepted = record.get("model_accepted")
    if accepted is not None:
        if not _are_ids(accepted) or len(accepted) != len(output):
            raise ValueError("model_accepted needs one number for each output token")
        accepted = np.array(accepted, np.int32)
    tokens = np.array([*prompt, *output], np.int32)
    return _cut(replace(template, model_accepted=accepted), tokens, len(prompt), len(tokens))


def _ids_of(script: Script, tokenizer: Any) -> list[list[int]]:
    """Token ids of each piece. A text that begins a sequence gets its beginning token."""
    ids: list[list[int]] = []
    begun = int(script.whole)
    for texts, special in ((script.pieces[:begun], True), (script.pieces[begun:], False)):
        if texts:
            ids += tokenizer(
                texts, add_special_tokens=special, return_attention_mask=False, verbose=False
            )["input_ids"]
    return ids


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)


@dataclass(frozen=True)
class Script:
    """A text in pieces. Piece ``i`` in ``outputs`` was generated after all pieces before it.

    ``whole``: the text begins a sequence and lacks the tokenizer's beginning token.
    """

    pieces: list[str]
    outputs: list[int]
    whole: bool = False


def content_of(message: dict[str, Any]) -> Message:
    """Role and text of a message; text parts are joined, tool calls become JSON.

    Raises:
        ValueError: the message has no role, or its content is not text.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError("a message has no role")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content or "", str):
        raise ValueError(f"a message of role {role} holds no text")
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return {"role": role, "content": "\n".join([*([content] if content else ()), *written])}


def conversation(record: dict[str, Any]) -> tuple[list[Message], list[int]]:
    """The messages of a line, and the indexes of those that are generations.

    Raises:
        ValueError: the line is none of the kinds above.
    """
    if isinstance(record.get("messages"), list):
        messages = [content_of(m) for m in record["messages"]]
        return messages, [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not isinstance(record.get("prompt"), list) or not isinstance(record.get("output"), str):
        raise ValueError("neither messages nor a prompt with its output")
    messages = [content_of(m) for m in record["prompt"]]
    messages.append({"role": "assistant", "content": record["output"]})
    return messages, [len(messages) - 1]


def scripts(messages: list[Message], generations: list[int], tokenizer: Any) -> list[Script]:
    """The conversation as its chat template renders it: one script, or one for each generation.

    Some templates change earlier turns as a dialogue grows, for example by dropping thoughts. These
    need a script for each generation, which costs more to tokenise.

    Raises:
        ValueError: there is no template, or it refuses these roles.
    """
    from jinja2 import TemplateError

    def render(upto: int, prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages[:upto], tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    try:
        return _pieces(messages, generations, render, tokenizer.eos_token or "")
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from error


def _pieces(messages: list[Message], generations: list[int], render: Any, end: str) -> list[Script]:
    prompts = [render(i, True) for i in generations]
    pieces: list[str] = []
    shown = ""
    followers = [*prompts[1:], render(generations[-1] + 1, False)] if generations else []
    for i, prompt, after in zip(generations, prompts, followers, strict=True):
        text = messages[i]["content"]
        if not after.startswith(prompt + text):
            text = text.strip()  # some templates do
        pieces += [prompt[len(shown) :], text]
        shown = prompt + text
        if not after.startswith(shown):
            return [
                Script([prompt, messages[i]["content"], end], [1])
                for i, prompt in zip(generations, prompts, strict=True)
            ]
    closing = followers[-1][len(shown) :] if followers else ""
    return [Script([*pieces, closing], list(range(1, len(pieces), 2)))]


def files_of(paths: Sequence[Path]) -> list[Path]:
    """``paths`` with each directory replaced by its trace files, by name.

    Raises:
        TraceError: a directory holds none.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise TraceError(f"no *.jsonl in {path}: name a folder of trace files, or files.")
        files += inside
    return files


class Parts(NamedTuple):
    """``warm_up`` fills the suffix cache before the others and is not measured."""

    train: list[Trace]
    warm_up: list[Trace]
    test: list[Trace]


def fraction(session: str, salt: str = "") -> float:
    """A number in 0..1 from a hash of the name."""
    digest = hashlib.blake2b(session.encode(), digest_size=8, key=salt.encode()).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def split(
    traces: Sequence[Trace], train: float = 0.6, warm_up: float = 0.1, limit: int | None = None
) -> Parts:
    """``traces`` split into about these shares, the rest for testing, by session. ``limit`` bounds
    their number, in whole sessions."""
    parts = Parts([], [], [])
    for trace in traces:
        at = fraction(trace.session)
        parts[0 if at < train else 1 if at < train + warm_up else 2].append(trace)
    if limit is None:
        return parts
    shares = (train, warm_up, 1.0 - train - warm_up)
    some = (some_sessions(p, limit * share) for p, share in zip(parts, shares, strict=True))
    return Parts(*some)


def some_sessions(traces: Sequence[Trace], least: float) -> list[Trace]:
    """Whole sessions, chosen by hash, that hold at least ``least`` traces; in order."""
    sizes = Counter(trace.session for trace in traces)
    chosen: set[str] = set()
    count = 0
    for session in sorted(sizes, key=lambda name: fraction(name, "limit")):
        if count >= least:
            break
        chosen.add(session)
        count += sizes[session]
    return [trace for trace in traces if trace.session in chosen]
