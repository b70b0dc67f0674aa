"""``hvd bootstrap`` as one types it: a bundle made, and checked in the ways it offers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoder.contracts.bundle import ANY_SCOPE
from decoder.policy.probes import from_bytes
from pipelines.cli import app
from tests.pipelines.lab.replay.samples import copying_traces, word_tokenizer
from tests.pipelines.test_cli import hvd

WORDS = [*"abcdefghijkl"]


def write(path: Path, seed: int, licence: str) -> None:
    """Forty dialogues in words, so that any tokenizer can read them."""

    def text(tokens: list[int]) -> str:
        return " ".join(WORDS[token] for token in tokens)

    rows = [
        {
            "session": t.session,
            "license": licence,
            "messages": [
                {"role": "user", "content": text(list(t.prompt))},
                {"role": "assistant", "content": text(list(t.output))},
            ],
        }
        for t in copying_traces(seed, 40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """Two sets that may be learned from, and one that may only be decoded."""
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "traces"
    folder.mkdir()
    for seed, (name, licence) in enumerate((("a", "MIT"), ("b", "Apache-2.0"), ("c", "none"))):
        write(folder / f"{name}.jsonl", seed, licence)
    return [
        *("bootstrap", "--traces", str(folder), "--tokenizer", str(tmp_path / "tokenizer")),
        *("--bundle", str(tmp_path / "first.safetensors"), "--generations", "30"),
    ]


def test_a_policy_is_made_and_checked_from_the_command_line(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def said(*options: str) -> str:
        done = CliRunner().invoke(app, [*asked, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    assert '"sets"' in said()
    policy = from_bytes((tmp_path / "first.safetensors").read_bytes(), "s")
    assert policy.scope == ANY_SCOPE
    rates = []
    for accepts, vocabulary in ((2.2, None), (0.0, 300)):
        more = () if vocabulary is None else ("--vocabulary", str(vocabulary))
        found = json.loads(said("--check", "--json", "--model-accepts", str(accepts), *more))
        assert found["settings"] == {"model_accepts": accepts, "vocabulary": vocabulary}
        sets = found["sets"]
        assert found["of_refit"]["least"] == min(s["of_refit"] for s in sets)
        assert [(s["name"], s["left_out"]) for s in sets] == [
            ("a", True),
            ("b", True),
            ("c", False),
        ]
        assert all(s["rates"]["first"] > 0.9 and s["of_refit"] > 0.5 for s in sets)
        rates.append([s["rates"]["counting"] for s in sets])
    # a drafter whose drafts are half accepted is worth something, and none is none
    assert all(with_one > without for with_one, without in zip(*rates, strict=True))


def test_what_cannot_be_checked_is_one_sentence_and_status_two(
    asked: list[str], tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    done = hvd(*asked, "--check", XDG_CACHE_HOME=cache)
    assert done.returncode == 2 and "no first policy" in done.stderr
    assert "Traceback" not in done.stderr
    wrong = hvd(*asked, "--check", "--model-accepts", "-1", XDG_CACHE_HOME=cache)
    assert wrong.returncode == 2 and "--model-accepts" in wrong.stderr
