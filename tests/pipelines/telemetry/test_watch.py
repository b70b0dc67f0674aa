"""Accepted length and calibration error by workload: a change is one line, noise is none."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from typer.testing import CliRunner

from decoder.contracts.events import decode_batch
from decoder.contracts.settings import KafkaSettings
from pipelines.cli import app
from pipelines.telemetry.watch import OTHERS, WORKLOADS, Change, Followed, follow
from tests.events import encode_events
from tests.pipelines.telemetry.conftest import NOW, ONE, produce
from tests.pipelines.watch.records import event


def batches(
    means: Sequence[float], workload: str = "chat", predicted: float = 2.0, censored: str = ""
) -> list[bytes]:
    """A record for each mean accepted length, of four requests with four drafts each."""
    draw, found = np.random.default_rng(3), []
    for sequence, mean in enumerate(means):
        accepted = draw.poisson(mean, 16).clip(0, 20).tolist()
        rows = [
            event(
                16 * sequence + n, NOW + sequence, accepted=of, draft_len=24, workload=workload,
                predicted=predicted, censored=censored, request=f"{sequence:08x}{n // 4:08x}",
            )
            for n, of in enumerate(accepted)
        ]  # fmt: skip
        found.append(encode_events(rows, ONE, sequence))
    return found


def changes(followed: Followed, values: Sequence[bytes]) -> list[Change]:
    return [change for value in values for change in followed.update(decode_batch(value))]


def test_a_change_is_found_in_its_own_workload_soon_and_noise_is_none() -> None:
    followed = Followed()
    assert changes(followed, batches([2.0] * 200)) == []
    assert changes(followed, batches([2.0] * 60, "edits")) == []
    found = changes(followed, batches([6.0] * 40))
    assert {(c.workload, c.measure) for c in found} == {
        ("chat", "accepted"), ("chat", "calibration")
    }  # fmt: skip
    first = next(c for c in found if c.measure == "accepted")
    assert first.before < first.now and first.time < NOW + 15
    assert "chat: accepted length 2." in str(first)
    told = followed.summary()["workloads"]
    assert told["chat"]["drafts"] == 240 * 16 and told["edits"]["drafts"] == 60 * 16
    assert told["chat"]["accepted"] == pytest.approx(6.0, abs=0.5)
    assert told["chat"]["calibration"] == pytest.approx(-4.0, abs=0.5)
    assert told["edits"]["calibration"] == pytest.approx(0.0, abs=0.3)


def test_a_label_that_is_a_lower_bound_says_nothing() -> None:
    followed = Followed()
    assert changes(followed, batches([2.0] * 5, censored="limit")) == []
    assert followed.summary() == {"workloads": {}, "refused": 0}


def test_names_that_anybody_makes_up_are_followed_together() -> None:
    followed = Followed()
    for number in range(WORKLOADS + 50):
        changes(followed, batches([2.0], f"made-up-{number}"))
    assert len(followed.drafts) == WORKLOADS + 1 and followed.drafts[OTHERS] == 50 * 16


def test_what_lies_on_the_topic_is_told_and_what_is_no_record_counted(
    filled: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", filled.bootstrap_servers)
    produce(filled, [(1, value) for value in batches([1.0] * 80 + [9.0] * 40, "records")])
    done = CliRunner().invoke(app, ["telemetry", "watch", "--once", "--json"])
    assert done.exit_code == 0, done.exception
    *lines, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"records"} == {line["workload"] for line in lines}
    assert last["refused"] == 4 and set(last["workloads"]) == {"records", "edits", "chat"}
    shown = CliRunner().invoke(app, ["telemetry", "watch", "--once"]).stdout
    assert "records: accepted length" in shown and "records: 1920 drafts" in shown
    ends = follow(filled, followed := Followed(), past=False, on=False)
    assert list(ends) == [] and followed.drafts == {}
