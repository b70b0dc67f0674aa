"""What the page on telemetry gives an analyst to run runs, and answers what a plain loop does."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.features import FEATURES
from decoder.contracts.fields import COLUMNS
from decoder.contracts.settings import KafkaSettings
from pipelines.telemetry.export import export
from tests.contracts.test_events import EVENT, ORIGIN
from tests.events import DraftEvent, encode_events
from tests.pipelines.telemetry.conftest import (
    HOSTILE,
    ONE,
    folder_of,
    mixed,
    of_learner,
    produce,
    spread,
)
from tests.pipelines.watch.records import event

PAGE = (folder_of("docs") / "telemetry.md").read_text(encoding="utf-8")
TOOLS = ("kcat", "jq")


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason="apt-get install kcat jq"
)
def test_the_lines_of_kcat_tell_events_as_they_are_and_how_far_a_learner_is(
    filled: KafkaSettings,
) -> None:
    """Also where others wrote what is no record."""
    of_learner(filled)
    produce(filled, [(0, json.dumps({"worker": "", "columns": 1, "features": {}}).encode())])
    events, standing = (
        [json.loads(row) for row in printed(line, filled).splitlines()]
        for line in re.findall(r"```sh\n(kcat.*?)```", PAGE, re.DOTALL)
    )
    sent = [json.loads(value) for _, value in mixed() if value not in HOSTILE]
    mine = [
        (record["worker"], number)
        for record in sent
        for number, arm in zip(record["columns"]["number"], record["columns"]["arm"], strict=True)
        if arm == "cache"
    ]  # also those that came twice
    assert sorted((row["worker"], row["number"]) for row in events) == sorted(mine)
    assert {row["arm"] for row in events} == {"cache"}
    names = {"worker", *COLUMNS, *(f"feature_{name}" for name in FEATURES)}
    assert all(row.keys() == names for row in events)
    assert standing[-1]["process"] == "learner" and None not in standing[-1].values()


def printed(line: str, kafka: KafkaSettings) -> str:
    there = line.replace("127.0.0.1:9092", kafka.bootstrap_servers)
    command = ["bash", "-o", "pipefail", "-c", there]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_the_reader_of_a_plain_client_prints_each_event_once(
    empty: KafkaSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    spread(empty)
    produce(empty, [sent for sent in mixed() if sent[1] not in HOSTILE])
    decoder, loop = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1:3]
    assert len(decoder.splitlines()) < 30 and "decoder" not in decoder + loop
    told: dict[str, Any] = {}
    exec(decoder + loop.replace("127.0.0.1:9092", empty.bootstrap_servers), told)
    lines = capsys.readouterr().out.splitlines()
    assert "2 records of one are missing" in lines
    assert len(lines) == 101
    (row,) = told["rows"](0, encode_events([EVENT], ORIGIN, 0))
    assert EVENT.features is not None and (row["worker"], row["accepted"]) == ("w", 4)
    for name, value in zip(FEATURES, EVENT.features, strict=True):
        assert row[f"feature_{name}"] == pytest.approx(float(value), abs=1e-5)


(BLOCK,) = re.findall(r"```python\n([^`]*duckdb.*?)```", PAGE, re.DOTALL)
QUESTIONS = ("pays", "drift", "calibration", "regret", "batch")
Rows = list[dict[str, Any]]

PLAIN_US, TOKEN_US, DRAFTER_US = 20_000.0, 500.0, 9_000.0
COUNT = 1_200


def step_us(batch: int, tokens: int, arm: str) -> float:
    return PLAIN_US + TOKEN_US * tokens + (DRAFTER_US if arm == "model" else 0.0)


def made(number: int, rng: random.Random) -> DraftEvent:
    """Long drafts in edits, short ones in chat, whose accepted length rises halfway; whichever arm,
    by lot; some requests end before the label is known, and some steps are a trial's."""
    edits, arm = rng.random() < 0.5, rng.choice(["cache", "model", "none"])
    late = number > COUNT // 2
    accepted = rng.randint(4, 8) if edits else rng.randint(0, 2) + 3 * late
    batch = rng.choice([1, 2, 8])
    ran = {"cache": rng.choice([4, 8]), "model": 3, "none": 0}[arm]
    tokens = batch + ran
    features = event(0, 0.0).features
    assert features is not None
    features[FEATURES.index("match_len")] = 12.0 if edits else 3.0
    return event(
        number, 1e9 + number, accepted=accepted, draft_len=8, verified_len=ran, arm=arm,
        batch_size=batch, step_tokens=tokens, step_us=step_us(batch, tokens, arm),
        workload="edits" if edits else "chat", predicted=6.0 if edits else 1.0,
        predicted_model=2.0, model_accepted=rng.randint(0, 3) if arm == "model" else None,
        censored="abort" if number % 50 == 0 else "", side="plain" if number % 40 == 1 else "",
        features=features,
    )  # fmt: skip


EVENTS = [made(number, random.Random(number)) for number in range(COUNT)]


@pytest.fixture(scope="module")
def folder(empty: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, and a file that an interrupted one left and its note does not name."""
    spread(empty, 1)
    cuts = range(0, COUNT, 100)
    produce(empty, [(0, encode_events(EVENTS[c : c + 100], ONE, c // 100)) for c in cuts])
    path = tmp_path_factory.mktemp("export") / "events"
    export(empty, path, lambda what, done, whole: None)
    (path / "drafts-00001.parquet").write_bytes((path / "drafts-00000.parquet").read_bytes())
    return path


def asked(folder: Path) -> dict[str, Rows]:
    """Every question's rows, by what the page gives an analyst to run."""
    found = dict[str, Rows]()
    with chdir(folder):
        for name in QUESTIONS:
            told: dict[str, Any] = {}
            exec(BLOCK.partition("answer.project")[0].replace('"pays"', f'"{name}"'), told)
            answer = told["answer"]
            found[name] = [dict(zip(answer.columns, r, strict=True)) for r in answer.fetchall()]
    return found


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Rows]:
    return asked(folder)


def only(rows: Rows, **values: Any) -> Rows:
    return [row for row in rows if values.items() <= row.items()]


def plain_us(batch: int) -> float:
    return (PLAIN_US + TOKEN_US * batch) / batch


def test_payoffs_drift_tenths_and_costs_are_of_the_events(found: dict[str, Rows]) -> None:
    mine = [e for e in EVENTS if e.workload == "chat" and not e.censored]
    times = sum(1 + 8 * TOKEN_US / plain_us(e.batch_size) for e in mine)
    (row,) = only(found["pays"], what="workload", value="chat")
    assert row["cache_pays"] == pytest.approx(sum(1 + e.accepted for e in mine) / times, rel=1e-6)
    apart = {row["workload"]: row["standard_errors"] for row in found["drift"]}
    assert apart["chat"] > 10 and abs(apart["edits"]) < 3
    cache = only(found["calibration"], arm="cache")
    assert len(cache) == 10 and cache[0]["expected"] == 1.0
    verified = [e for e in EVENTS if e.arm == "model" and not e.censored and not e.side]
    assert sum(r["drafts"] for r in only(found["calibration"], arm="model")) == len(verified)
    regret = {row["chosen"]: row for row in found["regret"]}
    assert regret.keys() == {"all", "cache", "model", "none"}
    assert regret["all"]["cycles"] == sum(not e.censored and not e.side for e in EVENTS)
    assert all(row["regret_us"] >= 0.0 for row in regret.values())
    (row,) = only(found["batch"], batch=8, arm="none")
    assert row["step_ms"] == step_us(8, 8, "none") / 1e3
