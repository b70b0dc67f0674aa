"""Recordings of prompts are made once: what is there is found again."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from pipelines import embedded, machine
from pipelines.lab.replay import recording
from pipelines.lab.replay.traces import read
from pipelines.prompts import tokenise
from pipelines.workloads import prompts

OUTPUTS: dict[str, list[int]] = {"a": [5, 6], "b": [], "c": [7, 8, 9]}


def asked(texts: str) -> list[list[int]]:
    return [[1, ord(text), 3] for text in texts]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was recorded of three prompts, the second without an answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = recording.folder_of()
    found.mkdir(parents=True)
    lines = [
        {"session": text, "prompt": ids, "output": OUTPUTS[text], "max_tokens": recording.ANSWER}
        for text, ids in zip(OUTPUTS, asked("abc"), strict=True)
    ]
    (found / "some.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return found


def no_step(*_: object) -> None:
    pytest.fail("a model was asked")


def test_what_was_recorded_is_not_recorded_again_and_read_in_the_order_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recording.record({"some": asked("cab")}, no_step) == folder
    for texts, outputs in (("cba", [[7, 8, 9], [5, 6]]), ("a", [[5, 6]])):
        found = recording.traces_of(folder, "some", asked(texts))
        assert [list(trace.output) for trace in found] == outputs
    monkeypatch.setattr(recording, "PROMPT", 21)
    assert recording.folder_of() != folder, "other lengths are others"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that holds the embedded model and nothing else."""
    model = embedded.ensure_model()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.cache_directory().mkdir(parents=True)
    embedded.model_directory().symlink_to(model)


@pytest.mark.long
@pytest.mark.usefixtures("empty_cache")
def test_recordings_are_made_once_and_can_be_replayed() -> None:
    ids = [tokenise(p, embedded.load_tokenizer(None)).ids for p in islice(prompts("chat"), 2)]
    told = list[tuple[str, int, int]]()

    def step(what: str, done: int, whole: int) -> None:
        told.append((what, done, whole))

    path = recording.record({"chat": ids[:1]}, step) / "chat.jsonl"
    first = path.read_bytes()
    assert recording.record({"chat": ids}, step) == recording.folder_of() == path.parent
    assert path.read_bytes().startswith(first)
    both = [("recording chat", done, 1) for done in (0, 1)] * 2
    assert told == both, "the second time one was there"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["session"] for line in lines}) == len(lines) == 2
    traces = read(path, None).traces
    assert len(traces) == len(lines)
    for trace in traces:
        assert trace.model_accepted is not None
        assert len(trace.model_accepted) == len(trace.output) > 1
