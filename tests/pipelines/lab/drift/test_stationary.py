"""Unchanging traffic for as long as one likes: what comes again, and what is counted."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from decoder.policy.first import first_policy
from learner.rows import Rows, from_events
from pipelines.cli import app
from pipelines.lab.drift import stationary
from pipelines.lab.drift.stationary import resampled, stream
from tests.learner.traffic import Traffic
from tests.pipelines.lab.replay.samples import copying_traces, word_tokenizer


def sessions(seed: int, sign: int, n: int = 40) -> list[list[Rows]]:
    """Each of two requests of twenty drafts."""
    rows = from_events(Traffic(seed=seed, sign=sign).events(2 * n))
    cuts = [rows.take(np.arange(at, at + 20)) for at in range(0, len(rows), 20)]
    return [cuts[at : at + 2] for at in range(0, len(cuts), 2)]


def test_sessions_come_again_whole_in_their_order_and_under_new_names() -> None:
    held = sessions(1, 1, n=5)
    found = list(islice(resampled(held, np.random.default_rng(1)), 200))
    names = [rows.session[0] for rows in found]
    assert len(set(names)) > 5 and names[:4] == names[4:8] and len(set(names[:4])) == 4
    assert all((rows.session == name).all() for rows, name in zip(found, names, strict=True))
    assert len({rows.request[0] for rows in found}) == len(found)
    first, second = found[0], found[4]
    assert any(
        np.array_equal(one.features, first.features)
        and np.array_equal(other.features, second.features)
        for one, other in held
    )


def test_alarms_of_a_stream_are_those_of_the_scope_that_it_is_fed_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = stream("k", 1, sessions(1, 1), first_policy("drift"), 3_000, lambda *_: None)
    assert (calm.cache, calm.model) == (0, 0) and 3_000 <= calm.rows < 3_020
    assert (calm.sessions, calm.different) == (40, 1_600)
    turned = iter([*islice(resampled(sessions(1, 1), np.random.default_rng(1)), 150),
                   *islice(resampled(sessions(2, -1), np.random.default_rng(1)), 151)])  # fmt: skip
    monkeypatch.setattr(stationary, "resampled", lambda *_: turned)
    assert stream("k", 1, sessions(1, 1), first_policy("drift"), 6_000, lambda *_: None).cache > 0


def test_the_command_counts_and_says_by_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stationary, "LENGTH", 700)
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "traces").mkdir()
    for seed, name in enumerate(("chat", "edits")):
        lines = [
            json.dumps({"session": f"{name}{i}", "prompt": t.prompt, "output": t.output})
            for i, t in enumerate(copying_traces(seed, 30, 70))
        ]
        (tmp_path / "traces" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def said(rows: int, *more: str) -> str:
        asked = [
            *("drift", "--traces", str(tmp_path / "traces")),
            *("--tokenizer", str(tmp_path / "tokenizer"), "--false-alarms", str(rows), *more),
        ]
        done = CliRunner().invoke(app, asked, catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    found = json.loads(said(2_100, "--json"))
    assert [(s["kind"], s["seed"]) for s in found["streams"]] == [
        ("agentic", 0), ("agentic", 1), ("chat", 0),
    ]  # fmt: skip
    assert found["rows"] == sum(each["rows"] for each in found["streams"]) >= 2_100
    assert "agentic" in said(700)
