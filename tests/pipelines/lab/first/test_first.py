"""A first policy from trace files: what may be learned from, what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import TraceError
from decoder.policy.estimate import PAPER_THRESHOLD
from decoder.policy.probes import from_bytes
from pipelines.cli import app
from pipelines.lab.first import make
from pipelines.lab.first.make import copies_of, read_sets
from pipelines.lab.replay.traces import files_of
from pipelines.replay.engine import Trace, drawn_acceptance
from tests.pipelines.lab.replay.samples import copying_traces, word_tokenizer

LICENCES = {"a": "MIT", "b": "Apache-2.0", "c": "Apache-2.0 (code), CC BY-NC 4.0 (data)"}


def write(path: Path, seed: int, licence: str) -> None:
    """Forty dialogues in words, so that any tokenizer can read them."""

    def said(role: str, tokens: list[int]) -> dict[str, str]:
        return {"role": role, "content": " ".join("abcdefghijkl"[token] for token in tokens)}

    lines = [
        json.dumps({
            "session": t.session, "license": licence,
            "messages": [said("user", list(t.prompt)), said("assistant", list(t.output))],
        })
        for t in copying_traces(seed, 40)
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "first.safetensors"


@pytest.fixture
def bootstrap(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """The command, on two sets that may be learned from, and one that may only be decoded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "traces").mkdir()
    for seed, (name, licence) in enumerate(LICENCES.items()):
        write(tmp_path / "traces" / f"{name}.jsonl", seed, licence)
    asked = [
        *("bootstrap", "--traces", str(tmp_path / "traces"), "--bundle", str(bundle)),
        *("--tokenizer", str(tmp_path / "tokenizer"), "--generations", "20"),
    ]
    return lambda *words: CliRunner().invoke(app, [*asked, *words])


def test_the_same_traces_give_the_same_policy_whose_card_says_what_of(
    bootstrap: Callable[..., Result], bundle: Path
) -> None:
    held = []
    for _ in range(2):
        assert '"sets"' in bootstrap().stdout
        held.append(bundle.read_bytes())
    assert held[0] == held[1]
    policy = from_bytes(held[0], "some scope")
    assert (policy.scope, policy.role, policy.kind) == (ANY_SCOPE, "first", "survival")
    sets = policy.provenance["sets"]
    assert [(s["name"], s["licence"]) for s in sets] == [("a", "MIT"), ("b", "Apache-2.0")]
    assert all(s["generations"] == 20 and s["over_counting_left_out"] > 0.5 for s in sets)
    assert policy.provenance["drafts_trained_on"] == sum(s["drafts"] for s in sets) > 500


def test_the_papers_network_is_made_with_a_threshold_that_suits_its_sets(
    bootstrap: Callable[..., Result], bundle: Path
) -> None:
    assert '"sets"' in bootstrap("--kind", "payoff").stdout
    policy = from_bytes(bundle.read_bytes(), "some scope")
    assert (policy.scope, policy.role, policy.kind) == (ANY_SCOPE, "first", "payoff")
    assert [len(bias) for _, bias in policy.layers] == [256, 256, 1]
    assert 0.0 <= policy.threshold < 12.0 and policy.threshold != PAPER_THRESHOLD
    sets = policy.provenance["sets"]
    assert all(each["over_counting_left_out"] > 0.9 for each in sets)


def test_copies_break_at_every_length_but_one_and_forms_are_filled_in() -> None:
    classes = np.zeros((50_000, 6), np.float32)
    traces = [
        Trace(f"s{n // 2}", [1, 2], np.arange(200, dtype=np.int32) + 1_000 + 300 * n)
        for n in range(120)
    ]
    broken, filled = copies_of(traces, 0.5, classes)
    assert 60 <= len(broken) < 64 and len(filled) == 60
    lengths = dict[str, set[int]]()
    for trace in broken:
        wrong = np.flatnonzero(np.asarray(trace.prompt)[2:] != np.asarray(trace.output))
        lengths.setdefault(trace.session, set()).add(int(wrong[0]) + 1)
    assert all(len(each) == 1 for each in lengths.values()), "a session's copies break alike"
    found = set[int]().union(*lengths.values())
    assert len(found) > 10 and found <= set(range(3, 25)) - {6}
    assert len({t.session.split("/")[0] for t in filled}) == 8
    assert copies_of(traces, 0.5, classes)[0][0].prompt.tolist() == broken[0].prompt.tolist()


def test_a_policy_that_has_seen_copies_says_so(
    bootstrap: Callable[..., Result], bundle: Path
) -> None:
    assert '"sets"' in bootstrap().stdout
    without = from_bytes(bundle.read_bytes(), "some scope").provenance
    assert '"sets"' in bootstrap("--copies", "0.5").stdout
    told = from_bytes(bundle.read_bytes(), "some scope").provenance
    assert (without["copies"], told["copies"]) == (0.0, 0.5)
    assert told["drafts_trained_on"] > 1.5 * without["drafts_trained_on"]


def test_what_cannot_be_made_is_said_and_ctrl_c_leaves_the_old_bundle_as_it_was(
    bootstrap: Callable[..., Result], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--licence" in str(bootstrap("--licence", "MIT").exception), "one set is left"
    assert "0 of the trace files" in str(bootstrap("--licence", "").exception), "all name one"
    unnamed = CliRunner().invoke(app, ["bootstrap", "--bundle", str(bundle)])
    assert "let 'hvd replay' record some" in str(unnamed.exception)

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    bundle.write_bytes(b"the old one")
    monkeypatch.setattr(make, "fit", pressed)
    assert bootstrap().exit_code
    assert [p.read_bytes() for p in bundle.parent.iterdir()] == [b"the old one"]


@given(st.floats(0.0, 4.0), st.integers(1, 8), st.integers(0, 9))
def test_a_drawn_drafter_is_right_or_wrong_about_a_token_for_every_draft(
    mean: float, most: int, seed: int
) -> None:
    found = drawn_acceptance(min(mean, most), most, 5_000, np.random.default_rng(seed))
    assert ((found >= 0) & (found <= most)).all()
    # a draft of p tokens accepted here goes on as one of p - 1, at least, one token later
    assert (found[1:] >= found[:-1] - 1).all()
    assert found.mean() == pytest.approx(min(mean, most), abs=0.5)


def test_a_session_is_learned_from_if_every_row_of_it_may_be(tmp_path: Path) -> None:
    rows = [
        {"session": "free", "license": "MIT"},
        {"session": "mixed", "license": "MIT"},
        {"session": "mixed", "license": "not stated"},
        {"session": "unnamed"},
        {"session": "other", "license": ["MIT"]},
    ]
    path = tmp_path / "traces" / "mixed.jsonl"
    with pytest.raises(TraceError, match=r"no \*.jsonl"):
        files_of([tmp_path])
    path.parent.mkdir()
    path.write_text("".join(json.dumps({**r, "prompt": [1], "output": [2]}) + "\n" for r in rows))
    for licences, sessions in (
        (("MIT",), ["free"]),
        (("MIT", "not stated"), ["free", "mixed", "mixed"]),
    ):
        found = read_sets(files_of([path.parent]), None, licences, lambda *_: None)
        assert [t.session for t in found["mixed"]] == sessions
