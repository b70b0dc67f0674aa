"""A first policy from trace files: what may be learned from, what comes out, how it is checked."""

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
from decoder.policy.probes import from_bytes
from pipelines.cli import app
from pipelines.lab.first import make
from pipelines.lab.first.make import read_sets, with_drafter
from pipelines.lab.replay.model_arm import drawn_acceptance
from pipelines.lab.replay.traces import Trace, files_of
from tests.pipelines.lab.replay.samples import copying_traces, word_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def write(path: Path, seed: int, licence: str | None = "MIT", count: int = 40) -> Path:
    rows = [
        {"session": t.session, "prompt": t.prompt, "output": t.output, "license": licence}
        for t in copying_traces(seed, count)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    write(folder / "a.jsonl", 1)
    write(folder / "b.jsonl", 2, "Apache-2.0")
    write(folder / "c.jsonl", 3, "Apache-2.0 (code), CC BY-NC 4.0 (data)")
    write(folder / "d.jsonl", 4, None)
    return folder


@given(st.floats(0.0, 4.0), st.integers(1, 8), st.integers(0, 200), st.integers(0, 9))
def test_a_drawn_drafter_is_right_or_wrong_about_a_token_for_every_draft(
    mean: float, most: int, length: int, seed: int
) -> None:
    found = drawn_acceptance(min(mean, most), most, length, np.random.default_rng(seed))
    assert found.shape == (length,) and ((found >= 0) & (found <= most)).all()
    # a draft of p tokens accepted here goes on as one of p - 1, at least, one token later
    assert (found[1:] >= found[:-1] - 1).all()


@pytest.mark.parametrize("mean", [0.0, 0.5, 2.2, 4.0])
def test_a_drawn_drafter_has_the_mean_it_was_asked_for(mean: float) -> None:
    found = drawn_acceptance(mean, 4, 50_000, np.random.default_rng(0))
    assert found.mean() == pytest.approx(mean, abs=0.05)


def test_sessions_have_drafters_of_their_own_and_a_recorded_one_stays() -> None:
    recorded = Trace("r", [1], [2, 3], model_accepted=[1, 0])
    known = [Trace("s", [1], [2] * 500), Trace("s", [1], [2] * 500), Trace("t", [1], [2] * 500)]
    first, again = (with_drafter([*known, recorded], (0.0, 3.5), 4, seed=7) for _ in range(2))
    means = [float(np.mean(t.model_accepted)) for t in first if t.model_accepted is not None]
    assert abs(means[0] - means[1]) < 0.3 < abs(means[0] - means[2])
    assert first[3].model_accepted == [1, 0]
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.model_accepted, other.model_accepted)


def test_a_session_is_learned_from_if_every_row_of_it_may_be(tmp_path: Path) -> None:
    rows = [
        {"session": "free", "license": "MIT"},
        {"session": "mixed", "license": "MIT"},
        {"session": "mixed", "license": "not stated"},
        {"session": "unnamed"},
        {"session": "other", "license": ["MIT"]},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({**r, "prompt": [1], "output": [2]}) + "\n" for r in rows))

    def sessions(licences: tuple[str, ...] | None) -> list[str]:
        found = read_sets([path], None, licences, lambda *_: None)
        return [t.session for t in found["mixed"]]

    assert sessions(("MIT",)) == ["free"]
    assert sessions(("MIT", "not stated")) == ["free", "mixed", "mixed"]
    assert len(sessions(None)) == 5


def test_a_folder_stands_for_its_files_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    made = write(tmp_path / "traces" / "b.jsonl", 1), write(tmp_path / "traces" / "a.jsonl", 2)
    assert files_of([tmp_path / "traces", made[0]]) == [made[1], made[0], made[0]]
    with pytest.raises(TraceError, match=r"no \*.jsonl"):
        files_of([tmp_path])


@pytest.fixture
def bootstrap(traces: Path, tokenizer: str, tmp_path: Path) -> Callable[..., Result]:
    asked = [
        *("bootstrap", "--traces", str(traces), "--tokenizer", tokenizer),
        *("--generations", "20", "--bundle", str(tmp_path / "out" / "first.safetensors")),
    ]
    (tmp_path / "out").mkdir()
    return lambda *words: CliRunner().invoke(app, [*asked, *words])


def test_the_same_traces_give_the_same_policy_and_its_card_says_what_it_was_made_of(
    bootstrap: Callable[..., Result], tmp_path: Path
) -> None:
    out, held = tmp_path / "out" / "first.safetensors", []
    for _ in range(2):
        assert bootstrap().exit_code == 0
        held.append(out.read_bytes())
    assert held[0] == held[1]
    policy = from_bytes(held[0], "some scope")
    assert (policy.scope, policy.role, policy.kind) == (ANY_SCOPE, "first", "survival")
    sets = policy.provenance["sets"]
    assert [(s["name"], s["licence"]) for s in sets] == [("a", "MIT"), ("b", "Apache-2.0")]
    assert all(s["generations"] == 20 and s["over_counting_left_out"] > 0.5 for s in sets)
    assert policy.provenance["drafts_trained_on"] == sum(s["drafts"] for s in sets) > 500


def test_a_licence_that_leaves_one_set_is_refused(bootstrap: Callable[..., Result]) -> None:
    assert "--licence" in str(bootstrap("--licence", "MIT").exception)


def test_ctrl_c_leaves_the_old_bundle_as_it_was(
    bootstrap: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "first.safetensors"
    out.write_bytes(b"the old one")

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "fit", pressed)
    assert bootstrap().exit_code
    assert [p.read_bytes() for p in out.parent.iterdir()] == [b"the old one"]
