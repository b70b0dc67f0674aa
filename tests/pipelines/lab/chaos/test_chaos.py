"""What chaos sees: wrong answers, what must not be on topics, troubles."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from decoder.contracts.errors import SettingsError
from decoder.contracts.events import Origin
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DRAFTS, POLICY, STATUS
from decoder.policy.probes import to_bytes
from pipelines import machine
from pipelines.lab.chaos.cli import chaos
from pipelines.lab.chaos.injections import FAULTS, Fault, TopicAudit, adds_up
from pipelines.lab.chaos.run import Seen, asking, faults_of, inject, staged
from pipelines.prompts import Prompt
from pipelines.stack.running import TRACKING_VARIABLE
from pipelines.watch.ledger import ingest
from tests.conftest import random_policy, until
from tests.events import encode_events
from tests.learner.traffic import Traffic

PROMPT = Prompt("p", "chat", "chat", ({"role": "user", "content": "?"},))
SEVEN = f"data: {json.dumps({'choices': [{'token_ids': [7]}]})}\n\n"


@contextmanager
def serving(*first: Any) -> Iterator[str]:
    """A server that gives this answer, a status and a text, and then sevens for ever."""
    answers = itertools.chain([first], itertools.repeat((200, SEVEN)))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, text = next(answers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "text"), [(200, 'data: {"error": {}}\n\n'), (200, "data: 7\n\n"), (503, "it ends")]
)
def test_what_is_no_answer_is_an_error_or_asked_again(status: int, text: str) -> None:
    with serving(status, text) as api, asking(api, "m", [PROMPT]) as clients:
        until(lambda: all(len(seen) > 1 for seen in clients))
    seen = [*itertools.chain.from_iterable(clients)]
    assert sum(bool(each.error) for each in seen) == (status != 503)
    assert sum(each.refused for each in seen) == (status == 503)
    assert all(each.tokens == (() if each.error else (7,)) for each in seen)
    with asking(f"http://127.0.0.1:{machine.free_port()}", "m", [PROMPT]) as clients:
        pass
    assert not any(clients), "nobody listens, and nothing fails"


@pytest.mark.parametrize(
    ("tokens", "refused", "error", "faults"),
    [
        ((7, 8), 1, "", ["a request was refused"]),
        ((7,), 0, "", ["a request failed: the answer broke off"]),
        ((), 0, "HTTP 500", ["a request failed: HTTP 500"]),
        ((8,), 0, "ReadError", ["a wrong answer to p"]),
    ],
)
def test_an_answer_is_right_or_not(tokens: Any, refused: int, error: str, faults: Any) -> None:
    stage: Any = SimpleNamespace(answers=[(7, 8)], prompts=[PROMPT])
    seen = Seen(0.0, 1.0, tokens, error, refused=refused)
    assert faults_of(seen, stage) == faults
    of_one_that_dies = [fault for fault in faults if "wrong" in fault]
    assert faults_of(seen, stage, may_fail=True, may_wait=True) == of_one_that_dies


EVENTS = Traffic(seed=1).events(3)[:40]
BATCH = DRAFTS.name, encode_events(EVENTS, Origin("s", "w", "a"), 0)
ALL = max(event.number for event in EVENTS) + 1
Record = tuple[str, bytes | None]


def audit(*records: Record) -> TopicAudit:
    made = TopicAudit()
    for topic, value in records:
        ingest(made, topic, b"scope/champion", value, 0.0)
    return made


def published(number: int, version: int = 1) -> Record:
    policy = replace(random_policy(version=version), publication=number)
    return POLICY.name, to_bytes(policy)


def status(kind: Any, process: str, time: float, **said: Any) -> Record:
    made = kind(process=process, scope="s", time=time, **said)
    return STATUS.name, made.model_dump_json().encode()


told, learned = partial(status, WorkerStatus, "w"), partial(status, LearnerStatus)
ORDER = [published(1), published(2), published(5)]
FORTH = [
    told(1.0, life="a", publication=2),
    told(2.0, life="b"),
    told(3.0, life="a", publication=3),
]


@pytest.mark.parametrize(
    ("records", "faults"),
    [
        ([*ORDER, *ORDER, (POLICY.name, None)], 0),  # read again
        ([published(2), published(2, version=9)], 1),
        ([*FORTH, *FORTH], 0),
        ([*FORTH, told(4.0, life="a", publication=2)], 1),
        ([BATCH, BATCH, learned("l-7", 1.0, events_consumed=ALL)], 0),
        ([BATCH, BATCH, learned("l-7", 1.0, events_consumed=ALL + 1)], 1),
        ([BATCH, told(1.0, life="a", events_made=80, events_sent=40)], 0),
        ([BATCH, told(1.0, life="a", events_made=80, events_sent=41)], 1),
        ([(DRAFTS.name, b"?"), (STATUS.name, b"?"), (POLICY.name, b"?")], 1),
    ],
)
def test_what_must_never_be_is_a_fault_and_what_is_read_again_is_none(
    records: list[Record], faults: int
) -> None:
    found = audit(*records)
    assert len(found.faults + found.contradictions()) == faults
    found.excused.add("a")  # its broker may have forgotten what it acknowledged
    assert "not on the topic" not in "".join(found.contradictions())


def test_an_account_adds_up_or_not_and_of_a_process_what_it_said_last_counts() -> None:
    said = {"events_made": 60, "events_sent": 40, "events_in_doubt": 4, "events_dropped": 9,
            "events_refused": {"No": 3}, "queue_depth": 4}  # fmt: skip
    account = {"made": 60, "delivered": 40, "in doubt": 4, "waiting": 4, "lost": 12}
    found = audit(BATCH, BATCH, told(1.0, life="a", **said))
    assert found.account("a") == account and adds_up(account)
    assert set(found.account("another").values()) == {0}
    assert found.account("a", before=account | {"made": 50})["made"] == 10
    assert adds_up(account | {"delivered": 44}) and adds_up(account | {"lost": 16})
    assert not adds_up(account | {"delivered": 39}), "one is nowhere"
    assert not adds_up(account | {"delivered": 45}), "one counted as lost is on the topic"
    found = audit(learned("l-7", 1.0, holds_lease=True), learned("l-8", 1.5), learned("l-7", 2.0))
    last = found.learner_of(7)
    assert last is not None and last.time == 2.0 and found.learner_of(9) is None
    assert found.has_spoken(-1.0, "-7") and not found.has_spoken(-1.0, "-9")


def test_no_trouble_is_made_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", "kafka.example.org:9092")
    with pytest.raises(SettingsError, match="unset HVD_KAFKA"):
        chaos(out=tmp_path)
    assert not [*tmp_path.iterdir()]


ALL = {each.name: each for each in FAULTS}
HIT = (
    "disk full for the worker, broker away",
    "learner and worker ended",
    "checkpoint damaged, learner killed",
    "learner held back, a second one there",
    "broker and worker killed",
)
REST = tuple(name for name in ALL if name not in HIT)


@pytest.mark.engine
@pytest.mark.stack
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(HIT, marks=pytest.mark.long, id="some"),
        pytest.param(REST, marks=[pytest.mark.release, pytest.mark.timeout(3000)], id="others"),
    ],
)
def test_what_is_hit_comes_back_and_a_wrong_answer_is_noticed(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if names is HIT:  # without a registry server, which takes a minute to start
        monkeypatch.setenv(TRACKING_VARIABLE, f"sqlite:///{tmp_path / 'mlflow.db'}")
    with staged(tmp_path / "stack", 1, Console(quiet=True)) as stage:
        done = [inject(stage, ALL[name]) for name in names]
        faults = [fault for each in done for fault in each["faults"]]
        assert [fault for fault in faults if "in time" not in fault] == []
        assert all(each["requests"] > 0 for each in done)
        for name, each in zip(names, done, strict=True):
            assert each["back s"].keys() >= {*ALL[name].kills, *ALL[name].hurts}
            assert ("second learner" in each["back s"]) == ("a second one" in name)
        assert 0 < stage.audit.counts["counted"] <= stage.audit.counts["made"]
        stage.answers[:] = [tuple(reversed(answer)) for answer in stage.answers]
        wrong = inject(stage, Fault("nothing", lambda stage: nullcontext()))["faults"]
        assert wrong and all("a wrong answer" in fault for fault in wrong)
