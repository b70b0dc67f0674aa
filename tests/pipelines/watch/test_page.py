"""The page as a file and as it is served: what it holds, what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.errors import ProcessError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import STATUS, TRIALS
from pipelines import machine
from pipelines.watch import live
from pipelines.watch.ledger import Ledger
from pipelines.watch.live import sentences, serving
from pipelines.watch.page import record, render
from tests.conftest import until
from tests.decoder.telemetry.broker import running
from tests.pipelines.watch import records
from tests.pipelines.watch.records import EVENTS

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(PATH is None, reason="apt-get install chromium-headless-shell")


def opened(url: str, dark: bool = False, seconds: float = 10.0) -> str:
    """The document at ``url`` after ``seconds`` of its scripts, which the browser does not wait."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(PATH), *options, f"--virtual-time-budget={round(1000 * seconds)}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def text_of(document: str, identifier: str) -> str:
    """Text of the element of that id, which holds no other."""
    (found,) = re.findall(rf'id="{identifier}"[^>]*>([^<]*)<', document)
    return str(found)


HOSTILE = '</script><img src=x onerror="document.title=1"><b id="run">{{ 1 }}'


def test_a_page_says_what_it_is_worth_what_is_in_force_what_was_learned_and_what_is_wrong() -> None:
    ledger = records.recorded(faults=3)
    said = {"rollout_said": "v2 is on trial", "drifts": 1, "last_drift_at": 1002.0}
    ledger.add_status(records.learner_status(1121.0, 10, **said))
    figures = record(ledger, "A run")
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    tiles = {tile["id"]: tile for tile in figures["tiles"]}
    assert list(tiles) == ["over_plain", "over_suffix", "over_first"]
    assert float(tiles["over_plain"]["value"]) == pytest.approx(1.5, rel=0.03)
    assert "60 pairs" in tiles["over_plain"]["detail"]
    charts = {chart["id"]: chart for chart in figures["charts"]}
    assert sum(max(d["y"], default=0) for d in charts["arms"]["data"]) == pytest.approx(100.0)
    band, line, _ = charts["ratio"]["data"][1:4]
    assert len(band["y"]) > len(line["y"]) > 5
    marks = {mark["label"]["text"] for mark in charts["ratio"]["layout"]["shapes"]}
    assert marks == {"agentic", "conversation", "v1", "v2", "alarm"}
    tables = {table["title"]: table["rows"] for table in figures["tables"]}
    phase, _ = tables["Phases: what the policy in force did"]
    assert phase[0] == "agentic" and float(phase[2]) == pytest.approx(60.0, rel=0.03)
    versions = [row[1:] for row in tables["Policy versions"]]
    assert ["v2", "in force on the worker"] in versions
    assert ["", "v2 is on trial"] in versions


def told(ledger: Ledger) -> list[str]:
    return [str(one["text"]) for one in sentences(ledger)]


def test_four_sentences_say_what_a_running_service_comes_to() -> None:
    nothing = told(Ledger())
    assert "no pair was played" in nothing[0] and "No worker" in nothing[1]
    assert "No learner" in nothing[2] and "the worker has said nothing;" in nothing[3]
    ledger, now = records.recorded(), time.time()
    said = {"candidates": 5, "promotions": 1, "rollout_said": "version 2: it was faster"}
    ledger.add_status(records.learner_status(now, EVENTS, **said))
    ledger.add_status(records.worker_status(now, 1, policy_version=2, publication=7))
    worth, force, learned, wrong = told(ledger)
    assert worth.startswith("It makes 1.") and worth.endswith("of plain decoding.")
    assert force == "Policy version 2, made by the learner, decides."
    assert f"took in {EVENTS} events, tried 5 candidates and promoted 1; version 2" in learned
    assert wrong == "Nothing is wrong."
    assert sentences(ledger, "http://m")[2]["href"] == "http://m"
    troubled = {"faults": 2, "events_dropped": 3, "drops": {"queue full": 3}, "fallback": "cache"}
    ledger.add_status(records.worker_status(now, 1, policy_version=2, **troubled))
    ledger.rounds = records.rounds(40, 1000.0, 2.0, {CHAMPION: 40.0, "plain": 40.0})
    worth, force, _, wrong = told(ledger)
    assert "cannot be told yet, about 1 minute more" in worth
    assert "The policy that ships is in force, but 'cache' decides" in force
    assert "2 faults" in wrong and "events of the worker are lost (3 queue full)" in wrong
    ledger.rounds = ledger.rounds[:6]
    assert "about 1 minute more of such traffic" in told(ledger)[0]


@needs_browser
def test_a_browser_draws_the_page_without_a_network_and_runs_no_name(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    told = render(record(records.recorded(phase=HOSTILE), HOSTILE, ["It was faster."]))
    file.write_text(told, encoding="utf-8")
    (figures,) = re.findall("^let figures = (.*);$", told, re.MULTILINE)
    assert json.loads(figures)["title"] == HOSTILE and len(told) > 3_000_000
    document = opened(file.as_uri(), dark=True)
    assert float(text_of(document, "over_plain")) == pytest.approx(1.5, rel=0.03)
    assert document.count("<svg") >= 5
    assert "It was faster." in document
    assert "rgb(228, 231, 234)" in document, "the ink on a dark page"
    assert "default-src 'none'" in document  # what the browser itself holds the page to
    assert '<b id="run"' not in document and "<img src" not in document
    assert "<title>&lt;/script&gt;" in document


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    with running(tmp_path_factory.mktemp("broker")) as reached:
        yield reached


def produce(kafka: KafkaSettings, began: float, rates: dict[str, float]) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(acks="all", **kafka.client_options())
    statuses = [records.worker_status(began + second, 60 * second) for second in range(31)]
    made = {TRIALS.name: records.rounds(30, began, 1.0, rates), STATUS.name: statuses}
    for topic, each in made.items():
        for one in each:
            producer.send(topic, key=b"worker", value=one.model_dump_json().encode())
    producer.flush()
    producer.close()


def detail(url: str) -> str:
    return str(httpx.get(f"{url}/figures.json").json()["tiles"][0]["detail"])


@needs_browser
def test_a_browser_reads_the_ratio_off_the_live_page_and_sees_it_change(kafka) -> None:
    began = time.time() - 120.0
    produce(kafka, began, records.FASTER)  # before the page is there: it reads what the topics hold
    with serving(kafka, 0) as url:
        until(lambda: "30 pairs" in detail(url))
        document = opened(url, seconds=1.0)
        ratio = float(text_of(document, "over_plain"))
        assert ratio == pytest.approx(1.5, rel=0.03)
        assert text_of(document, "over_plain-detail") == detail(url)
        assert text_of(document, "made").startswith("live")
        assert "rgb(29, 33, 38)" in document, "the ink on a light page"
        produce(kafka, began + 60.0, {**records.FASTER, CHAMPION: 40.0})
        until(lambda: "60 pairs" in detail(url))
        assert float(text_of(opened(url, seconds=12.0), "over_plain")) < ratio - 0.1


@pytest.fixture
def address() -> Iterator[str]:
    nowhere = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    with serving(nowhere, 0, "http://anna:hunter2@127.0.0.1:9") as address:
        yield address


def test_the_live_page_is_served_to_this_machine_while_no_broker_is_there(address: str) -> None:
    page = httpx.get(address)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert detail(address) == "not played"
    assert "http://127.0.0.1:9" in page.text and "hunter2" not in page.text
    assert httpx.get(f"{address}/etc/passwd").status_code == 404
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(ProcessError, match=f"port {port} is taken"), serving(KafkaSettings(), port):
        pass
    for host, status in (("localhost", 200), ("localhost.evil.example:80", 403), ("", 403)):
        asked = httpx.get(f"{address}/figures.json", headers={"Host": host})
        assert asked.status_code == status, "a page of a stranger whose name leads here"


def test_figures_that_cannot_be_computed_are_said_in_a_sentence(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(live, "record", lambda *_, **__: 1 / 0)
        for answer in (httpx.get(address), httpx.get(f"{address}/figures.json")):
            told = (answer.status_code, answer.text)
            assert told == (503, "The figures cannot be computed now: try again.")
    assert len(caplog.records) == 1, "said once a minute"
    assert httpx.get(address).status_code == 200
