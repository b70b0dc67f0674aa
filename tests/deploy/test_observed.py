"""The processes of the containers as processes here, under a real Prometheus: each panel of the
dashboard has data, and failures that can be caused fire their alerts, which end with them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, POLICY, policy_key
from learner.loop import ESTABLISHED
from pipelines import embedded, machine
from pipelines.stack import processes
from pipelines.stack.processes import Child, Part
from pipelines.stack.running import registry_arguments, responds
from pipelines.workloads import prompts
from tests import conftest
from tests.decoder.telemetry.broker import send
from tests.deploy.test_manifests import BIN, COMPOSE, DEPLOY
from tests.learner.conftest import Broker
from tests.learner.stage import WARNINGS
from tests.server import metric

pytestmark = [
    *WARNINGS,
    pytest.mark.stack,
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="takes Prometheus: apt-get install prometheus"
    ),
]
PATIENCE_S = 300.0
until = partial(conftest.until, seconds=PATIENCE_S, turn=partial(time.sleep, 0.5))
WINDOW = "30s"
"""Stands in place of the minutes and hours over which the rules look back."""
PROGRAMS = {"python": sys.executable, "hvd": str(BIN / "hvd")}


def command_of(service: str, **instead: str) -> list[str]:
    """What the container of ``service`` runs; some arguments are others here."""
    told = COMPOSE["services"][service]
    file = (DEPLOY.parent / told["build"]["dockerfile"]).read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", file, re.MULTILINE)
    whole = [*json.loads(entry), *told["command"]]
    assert instead.keys() <= set(whole), f"{instead} is not in {whole}"
    return [PROGRAMS[whole[0]], *(instead.get(word, word) for word in whole[1:])]


@dataclass
class Observed:
    """The running parts, and ways to ask and to hurt them."""

    folder: Path
    kafka: KafkaSettings
    ports: dict[str, int]
    environment: dict[str, str]
    broker: Broker
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, name: str, arguments: list[str], **settings: str) -> Child:
        log = self.folder / f"{name}.log"
        environment = {**self.environment, **settings}
        child = processes.start(Part(name, arguments, log, environment=environment), again=True)
        self.children[name] = child
        return child

    def start_registry(self) -> None:
        home = self.folder / "mlruns"
        home.mkdir(exist_ok=True)
        self.start("registry", registry_arguments(self.ports["registry"], home))

    def start_learner(self) -> None:
        self.start(
            "learner", command_of("learner"),
            HVD_LEARNER_LOG=COMPOSE["services"]["learner"]["environment"]["HVD_LEARNER_LOG"],
            HVD_LEARNER_PORT=str(self.ports["learner"]),
            OMP_NUM_THREADS="1",
        )  # fmt: skip

    def start_worker(self) -> None:
        command = command_of("worker", **{"8000": str(self.ports["worker"])})
        self.start("worker", command, HVD_WORKER_HOLDOUT="0.5", VLLM_CPU_KVCACHE_SPACE="1")

    def kill(self, name: str) -> None:
        os.killpg(self.children[name].process.pid, signal.SIGKILL)
        self.children[name].process.wait()

    def url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def page(self) -> str:
        return httpx.get(self.url("worker", "/metrics"), timeout=300).raise_for_status().text

    def found(self, expression: str) -> Any:
        """The series that Prometheus finds."""
        asked = httpx.get(
            self.url("prometheus", "/api/v1/query"), params={"query": expression}, timeout=300
        )
        assert asked.is_success, asked.text
        return asked.json()["data"]["result"]

    def query(self, expression: str) -> list[float]:
        """The values that Prometheus finds, of each series one; those of 0/0 left out."""
        values = [float(series["value"][1]) for series in self.found(expression)]
        return [value for value in values if not math.isnan(value)]

    def fires(self, alert: str) -> bool:
        return bool(self.query(f'ALERTS{{alertname="{alert}", alertstate="firing"}}'))

    def ask(self) -> None:
        """One request with something to copy."""
        prompt = next(self.prompts)
        asked = {"model": embedded.SERVED_NAME, "messages": prompt.messages, "max_tokens": 48}
        url = self.url("worker", "/v1/chat/completions")
        httpx.post(url, json=asked | {"temperature": 0}, timeout=PATIENCE_S).raise_for_status()

    def __post_init__(self) -> None:
        self.prompts: Any = prompts("edits")


def shortened(rules: str) -> str:
    """The same rules, impatient: what counts is that they fire and end, not after how long."""
    rules = re.sub(r"\bfor: \S+", "for: 1s", rules)
    return re.sub(r"(\[|offset )\d+[mhd]", rf"\g<1>{WINDOW}", rules)


def scraped(folder: Path, ports: dict[str, int]) -> list[str]:
    """Prometheus with the shipped configuration, its targets and times those of this test."""
    shipped = DEPLOY / "prometheus"
    config = yaml.safe_load((shipped / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name'][4:]]}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_text(shortened((shipped / "alerts.yml").read_text()))
    return [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
    ]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    embedded.ensure_model()
    folder = tmp_path_factory.mktemp("observed")
    ports = {n: machine.free_port() for n in ("worker", "learner", "registry", "prometheus")}
    broker = Broker(folder / "broker")
    environment = {
        **os.environ, "HVD_KAFKA_BOOTSTRAP_SERVERS": broker.kafka.bootstrap_servers,
        "HVD_LEARNER_MLFLOW_TRACKING_URI": f"http://127.0.0.1:{ports['registry']}",
        "HVD_LEARNER_STATE_DIR": str(folder / "learner"), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "HVD_WORKER_NAME": "worker",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    made = Observed(folder, broker.kafka, ports, environment, broker)
    try:
        topics = command_of(
            "topics", **{"/etc/hvd/topics.toml": str(DEPLOY / "kafka" / "topics.toml")}
        )
        assert made.start("topics", topics).process.wait(PATIENCE_S) == 0
        made.start_worker()
        made.start_registry()
        processes.wait_until(
            made.children["registry"], lambda: responds(made.url("registry", "/health")), PATIENCE_S
        )
        made.start_learner()
        made.start("prometheus", scraped(folder, ports))
        processes.wait_until(
            made.children["worker"], lambda: responds(made.url("worker", "/health")), PATIENCE_S
        )
        yield made
    finally:
        processes.stop(list(made.children.values()))
        made.broker.stop()


@pytest.fixture
def traffic(observed: Observed) -> Iterator[None]:
    """Requests one after another until the test ends."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                observed.ask()
            except httpx.HTTPError:
                over.wait(0.5)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    over.set()
    thread.join()


def test_vllms_counters_mean_the_same_under_drafts_of_any_length(observed: Observed) -> None:
    for _ in range(4):
        observed.ask()
    counts = [f"hvd_requests_{what}_total" for what in ("started", "stopped")]
    until(lambda: len({metric(observed.page(), count) for count in counts}) == 1, "their ends")
    before = ""
    while (page := observed.page()) != before:
        before = page
        time.sleep(3)
    started = metric(page, "hvd_requests_started_total")
    assert started == metric(page, "hvd_requests_stopped_total") >= 4
    ours = {
        what: sum(metric(page, f"hvd_{what}_total", arm=arm) for arm in ("cache", "model"))
        for what in ("cycles", "drafted", "accepted")
    }
    said = "vllm:spec_decode_num_"
    theirs = {
        "cycles": metric(page, f"{said}drafts_total"),
        "drafted": metric(page, f"{said}draft_tokens_total"),
        "accepted": metric(page, f"{said}accepted_tokens_total"),
    }
    print(ours, theirs)
    assert ours["accepted"] > 0
    # the last step of an answer may accept more than the answer has room for: vLLM counts it
    for what in ("cycles", "drafted"):
        assert theirs[what] == ours[what]
    assert ours["accepted"] <= theirs["accepted"] <= ours["accepted"] + 64 * started


def test_the_workers_log_is_json(observed: Observed) -> None:
    lines = (observed.folder / "worker.log").read_text().splitlines()
    ours = [json.loads(line) for line in lines if line.startswith("{") and "decoder" in line]
    assert ours
    learner = (observed.folder / "learner.log").read_text().splitlines()
    assert all(json.loads(line)["message"] for line in learner)


def panels() -> list[tuple[str, str]]:
    dashboard = json.loads((DEPLOY / "grafana" / "hvd.json").read_text())
    found = [
        (panel["title"], target["expr"].replace("$__rate_interval", WINDOW))
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    assert len(found) > 40
    return found


def test_each_panels_query_returns_data(observed: Observed, traffic: None) -> None:
    assert responds(observed.url("learner", "/health"))
    missing = panels()

    def all_answered() -> bool:
        missing[:] = [(title, query) for title, query in missing if not observed.query(query)]
        return not missing

    until(all_answered, missing)
    assert responds(observed.url("learner", "/ready"))


def ends(observed: Observed, *alerts: str) -> None:
    """Wait until none of them fires any more."""
    for alert in alerts:
        until(lambda alert=alert: not observed.fires(alert), f"the end of {alert}")


def begins(observed: Observed, *alerts: str) -> None:
    for alert in alerts:
        until(lambda alert=alert: observed.fires(alert), alert)


def test_what_is_refused_fires_and_ends(observed: Observed) -> None:
    (scope,) = {series["metric"]["scope"] for series in observed.found("hvd_serving")}
    alerts = ("HvdRecordsRefused", "HvdPolicyRefused")
    assert not any(map(observed.fires, alerts))
    send(observed.kafka, DRAFTS.name, b"not json")
    send(observed.kafka, POLICY.name, b"no bundle", key=policy_key(scope, "champion"))
    begins(observed, *alerts)
    ends(observed, *alerts)


def test_a_broker_that_is_away_fires_and_ends(observed: Observed, traffic: None) -> None:
    alerts = ("HvdEventsWaiting", "HvdNobodyHoldsTheLease")
    established = f"max(hvd_learner_drafts_consumed_total) >= {ESTABLISHED}"
    until(lambda: observed.query(established), "that the scope is somebody's")
    # a lease may lapse for a moment on a busy machine
    until(lambda: not any(map(observed.fires, alerts)), "leases and events on their way")
    time.sleep(2)  # the embedded broker saves its topics every second
    observed.broker.stop()
    begins(observed, *alerts)
    observed.broker = Broker(observed.folder / "broker", observed.broker.port)
    ends(observed, *alerts)


def test_processes_that_are_down_fire_and_end(observed: Observed) -> None:
    downs = {"learner": "HvdLearnerDown", "worker": "HvdWorkerDown"}
    ends(observed, *downs.values())  # a page may come late on a busy machine
    for name in downs:
        observed.kill(name)
    begins(observed, *downs.values())
    observed.start_learner()
    observed.start_worker()
    ends(observed, *downs.values())
