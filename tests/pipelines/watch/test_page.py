from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.errors import ProcessError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import STATUS, TRIALS
from decoder.policy.first import first_policy
from pipelines import machine
from pipelines.watch.charts import tenths
from pipelines.watch.ledger import Ledger, Phase
from pipelines.watch.live import serving
from pipelines.watch.page import page, record
from tests.decoder.telemetry.broker import running
from tests.pipelines.watch.browser import needs_browser, opened, text_of
from tests.pipelines.watch.records import (
    SCOPE,
    WORKER,
    batch,
    event,
    learner_status,
    rounds,
    worker_status,
)

RATES = {CHAMPION: 60.0, "plain": 40.0, "suffix": 55.0}


def seen(name: str = "agentic") -> Ledger:
    ledger = Ledger(WORKER)
    for second in range(61):
        changes = {"step_us": {"1": 20_000, "8": 30_000}, "policy_version": 1 + (second > 30)}
        ledger.add_status(worker_status(1000.0 + second, 60 * second, **changes))
    ledger.add_drafts(batch([event(i, 1000.0 + i / 8, accepted=i % 8) for i in range(480)]))
    for one in rounds(30, 1000.0, 2.0, RATES):
        ledger.add_round(one)
    ledger.phases = [Phase(name, ("edits",), 1000.0, 1060.0)]
    return ledger


def test_the_figures_of_a_page_are_json_and_hold_ratio_phases_and_charts() -> None:
    figures = record(seen(), "A run")
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert [tile["id"] for tile in figures["tiles"]] == ["over_plain", "over_suffix"]
    plain = figures["tiles"][0]
    assert float(plain["value"]) == pytest.approx(1.5, rel=0.03)
    assert "30 pairs" in plain["detail"]
    charts = {chart["id"]: chart for chart in figures["charts"]}
    assert charts["costs"]["data"][0]["y"] == [20.0, 30.0]
    assert sum(max(d["y"], default=0) for d in charts["arms"]["data"]) == pytest.approx(100.0)
    band, line, _ = charts["ratio"]["data"][:3]
    assert len(band["y"]) > len(line["y"]) > 5
    texts = [a["text"] for a in charts["ratio"]["layout"]["annotations"]]
    assert "agentic" in texts
    assert "v2" in texts


def test_a_page_of_nothing_is_a_page() -> None:
    figures = record(Ledger(), "Nothing yet")
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert [tile["value"] for tile in figures["tiles"]] == ["-"]


def test_a_worker_that_is_called_like_a_mark_of_the_template_is_shown_as_that() -> None:
    names = ["@PLOTLY@", "@TITLE@", "@LIVE@", "@FIGURES@"]
    shown = record(Ledger(), " ".join(names), names)
    told = page(shown)
    assert f"<title>{' '.join(names)}</title>" in told and len(told) > 3_000_000
    (figures,) = re.findall("^let figures = (.*);$", told, re.MULTILINE)
    assert json.loads(figures) == shown and shown["sentences"] == names


def test_versions_link_to_the_registry() -> None:
    ledger = seen()
    ledger.add_policy(1001.0, SCOPE, CHAMPION, first_policy(SCOPE))
    ledger.add_status(learner_status(1002.0, 10, rollout_said="v2 is on trial"))
    tables = record(ledger, "A run", versions="http://mlflow/versions/")["tables"]
    (versions,) = (t for t in tables if t["title"] == "Policy versions")
    assert any(row[2] == "v2 is on trial" for row in versions["rows"])
    links = [row[1] for row in versions["rows"] if isinstance(row[1], dict)]
    assert {"text": "v2", "href": "http://mlflow/versions/2"} in links


def test_tenths_foresee_what_the_policy_does() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    policy = first_policy(SCOPE)
    features = policy.probe_inputs[rng.integers(0, len(policy.probe_inputs), 200)]
    said, came, counts = tenths(policy, features, rng.random(200).astype(np.float32))
    assert said == sorted(said)
    assert len(said) == len(came) == 10
    assert sum(counts) == 200
    assert tenths(policy, features[:5], np.zeros(5, np.float32)) == ([], [], [])


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_the_page_without_a_network(tmp_path: Path, dark: bool) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(record(seen(), "A run", ["It was faster."])), encoding="utf-8")
    document = opened(file.as_uri(), dark)
    assert float(text_of(document, "over_plain")) == pytest.approx(1.5, rel=0.03)
    assert document.count("<svg") >= 7
    assert "It was faster." in document
    ink = "rgb(228, 231, 234)" if dark else "rgb(29, 33, 38)"
    assert ink in document
    assert "default-src 'none'" in document  # what the browser itself holds the page to


@needs_browser
def test_names_from_outside_are_shown_and_not_run(tmp_path: Path) -> None:
    name = '</script><img src=x onerror="document.title=1"><b id="run">'
    file = tmp_path / "report.html"
    file.write_text(page(record(seen(name), "A run")), encoding="utf-8")
    document = opened(file.as_uri())
    assert "<title>A run</title>" in document
    assert '<b id="run"' not in document
    assert "<img src" not in document
    assert float(text_of(document, "over_plain")) > 1.0


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    with running(tmp_path_factory.mktemp("broker")) as reached:
        yield reached


def produce(kafka: KafkaSettings, began: float, rates: dict[str, float]) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(acks="all", **kafka.client_options())
    for one in rounds(30, began, 1.0, rates):
        producer.send(TRIALS.name, key=b"worker", value=one.model_dump_json().encode())
    for second in range(31):
        status = worker_status(began + second, 60 * second)
        producer.send(STATUS.name, key=b"worker", value=status.model_dump_json().encode())
    producer.send(TRIALS.name, key=b"worker", value=b"no round")
    producer.flush()
    producer.close()


def figures_when(url: str, pairs: int) -> dict:
    deadline = time.monotonic() + 60.0
    while (
        f"{pairs} pairs"
        not in (found := httpx.get(f"{url}/figures.json").json())["tiles"][0]["detail"]
    ):
        assert time.monotonic() < deadline, found["tiles"]
        time.sleep(0.1)
    return found


@needs_browser
def test_a_browser_reads_the_ratio_off_the_live_page_and_sees_it_change(kafka) -> None:
    began = time.time() - 120.0
    produce(kafka, began, RATES)  # before the page is there: it reads what the topics hold
    with serving(kafka, 0) as url:
        first = figures_when(url, 30)
        document = opened(url, seconds=1.0)
        ratio = float(text_of(document, "over_plain"))
        assert ratio == pytest.approx(1.5, rel=0.03)
        assert text_of(document, "over_plain-detail") == first["tiles"][0]["detail"]
        assert text_of(document, "made").startswith("live")
        produce(kafka, began + 60.0, {**RATES, CHAMPION: 40.0})
        figures_when(url, 60)
        assert float(text_of(opened(url, seconds=12.0), "over_plain")) < ratio - 0.1


def test_the_live_page_outlives_a_broker_that_is_not_there() -> None:
    nowhere = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    with serving(nowhere, 0) as url:
        assert httpx.get(url).is_success
        assert httpx.get(f"{url}/figures.json").json()["tiles"][0]["value"] == "-"
        assert httpx.get(f"{url}/etc/passwd").status_code == 404


def test_a_taken_port_is_named(kafka) -> None:
    with serving(kafka, 0) as url:
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(ProcessError, match=f"port {port} is taken"), serving(kafka, port):
            pass
