"""Each alert fires on series that show its failure, and is over when they show its end."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from decoder.contracts.status import LearnerStatus, SideSums, WorkerStatus
from decoder.telemetry import metrics as told
from learner import metrics as learned
from learner.loop import ESTABLISHED
from tests.deploy.test_manifests import OVERLAYS, built, containers, needs_kubectl, pods

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="takes promtool: apt-get install prometheus"
)


@dataclass(frozen=True)
class Case:
    """Series by the minute, and minutes at which the alert fires for one thing, and for none."""

    series: dict[str, str]
    fires: int
    over: int


def case(fires: int, over: int, *series: str) -> Case:
    """Series as ``name{labels}  values``."""
    return Case(dict(one.rsplit("  ", 1) for one in series), fires, over)


W, L = '{worker="w"}', '{job="hvd-learner", instance="l"}'
S = '{job="hvd-learner", instance="l", scope="s"}'
UP, REFUSED = 'up{job="hvd-worker", instance="w"}', "hvd_learner_records_refused_total"
RANGE, LOST = '{instance="l", reason="range"}', "hvd_learner_events_lost_total"
CASES = {
    "HvdWorkerDown": case(4, 6, f"{UP}  1 0x4 1x4"),
    "HvdWorkerNotStarted": case(37, 43, f"{UP}  0x40 1x4"),
    "HvdPluginSilent": case(
        8, 12, f"{UP}  1x20", 'hvd_serving{instance="w", worker="w", scope="s"}  _x10 1x10'
    ),
    "HvdEventsLost": case(
        4, 30, 'hvd_drops_total{worker="w", reason="shed"}  0+50x40',
        'hvd_events_refused_total{worker="w", reason="TopicAuthorizationFailed"}  _x2 5x40',
    ),
    "HvdEventsWaiting": case(
        7, 12, f"hvd_queue_depth{W}  9x20", f"hvd_events_sent_total{W}  0+5x3 15x6 20+5x10"
    ),
    "HvdCarrierDies": case(4, 20, f"hvd_carrier_deaths_total{W}  0 0 1x30"),
    "HvdPolicyRefused": case(
        4, 20, 'hvd_refusals_total{worker="w", reason="probe"}  _x2 1x30'
    ),
    "HvdPolicyBehind": case(
        8, 12, f"hvd_publication{W}  3x9 4x9", 'hvd_serving{worker="w", scope="s"}  1x20',
        f"hvd_learner_publication{S}  3 4x20",
    ),
    "HvdFloorInForce": case(  # in the end nobody asks for anything
        18, 45, 'hvd_fallback{worker="w", arm="none"}  0 1x60',
        f"hvd_tokens_total{W}  0+60x20 1200x50",
    ),
    "HvdFaults": case(4, 20, f"hvd_faults_total{W}  0 0 2x30"),
    "HvdDecisionSlow": case(13, 18, f"hvd_exposed_us_p50{W}  400 9000x14 400x9"),
    "HvdLearnerDown": case(8, 12, f"up{L}  1 0x9 1x6"),
    "HvdIntakesDown": case(8, 12, 'up{job="hvd-intake", instance="i"}  1 0x9 1x6'),
    "HvdOtherSchema": case(
        125, 200, 'hvd_learner_records_refused_total{instance="l", reason="schema"}  0+1x150 150x60'
    ),
    "HvdLearnerBehind": case(8, 13, f"hvd_learner_lag_seconds{L}  0 300x9 0x9"),
    "HvdRecordsSkipped": case(4, 20, f"hvd_learner_records_skipped_total{L}  0 0 7x30"),
    "HvdRecordsRefused": case(4, 20, f"{REFUSED}{RANGE}  _x2 1x30"),
    "HvdLearnerFaults": case(4, 20, f"hvd_learner_faults_total{L}  0 0 1x30"),
    "HvdLessonsLost": case(
        4, 20, LOST + '{instance="l", scope="s", reason="fault"}  _x2 7x3 9x30'
    ),
    "HvdCheckpointOld": case(9, 14, f"hvd_learner_checkpoint_age{L}  10 400x9 10x9"),
    "HvdRegistryAway": case(5, 9, f"hvd_learner_registry_away_seconds{L}  0 60x6 0x9"),
    "HvdRegistryRefuses": case(
        4, 20, 'hvd_learner_given_up_total{instance="l", reason="refused"}  _x2 1x30'
    ),
    "HvdNobodyHoldsTheLease": case(
        15, 22, f"hvd_learner_holds_lease{S}  0x20 1x9",
        f"hvd_learner_drafts_consumed_total{S}  {ESTABLISHED - 1}x9 {ESTABLISHED}x30",
    ),
    "HvdTwoHoldTheLease": case(
        4, 8, 'hvd_learner_holds_lease{instance="a", scope="s"}  1x20',
        'hvd_learner_holds_lease{instance="b", scope="s"}  0 1x4 0x9',
    ),
    "HvdMiscalibrated": case(
        45, 110, f"hvd_learner_predicted_tokens_total{S}  0+900x60 54000+200x60",
        f"hvd_learner_accepted_tokens_total{S}  0+200x120",
    ),
    "HvdTrafficKeepsChanging": case(12, 100, f"hvd_learner_drifts_total{S}  0+1x10 10x120"),
}  # fmt: skip
FURTHER = [
    ("HvdWorkerDown", case(6, 13, f"{UP}  1 1 stale _x8 1x4")),
    # of none it is not known under which name it would be
    ("HvdWorkerNotStarted", case(37, 20, 'up{job="kubernetes-pods", instance="w"}  1x99')),
    # the checkpoint keeps the count
    ("HvdRecordsRefused", case(42, 37, f"{REFUSED}{RANGE}  _x2 9x20 stale _x12 9x5 11x30")),
    # of intakes that are gone nothing is scraped
    ("HvdIntakesDown", case(8, 12, 'up{job="hvd-intake", instance="i"}  1 1 stale _x8 1x6')),
    ("HvdEventsLost", case(4, 30, 'hvd_drops_total{worker="w", reason="queue"}  _x2 5x40')),
    # ten minutes after a pause, the same count is no news
    ("HvdLessonsLost", case(
        4, 35, LOST + '{instance="l", scope="s", reason="disk"}  _x2 9x20 stale _x3 7x30'
    )),
]  # fmt: skip
"""Another way to the same alert."""
ON_PURPOSE = {
    "of a stock side, as the quickstart sets": f'{LOST}{{scope="s", reason="side"}}  0+12x180',
    "of the other release, during an upgrade": (
        f'{REFUSED}{{instance="l", reason="schema"}}  0+40x90 3600x90'
    ),
    "of a fleet that sheds": 'hvd_drops_total{worker="w", reason="shed"}  0+50x180',
}
"""Counts that grow though nothing is wrong."""


def test_every_alert_has_a_case_and_a_runbook_and_says_what_to_do() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    runbooks = set(re.findall(r"^### (Hvd\w+)$", page, re.MULTILINE))
    assert CASES.keys() == ALERTS.keys() == runbooks
    for rule in ALERTS.values():
        assert rule["annotations"]["summary"].endswith(".") and rule["annotations"]["todo"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


@needs_promtool
def test_each_fires_and_is_over(tmp_path: Path) -> None:
    _run(tmp_path, [_written(name, case) for name, case in [*CASES.items(), *FURTHER]])


@needs_promtool
def test_what_is_counted_on_purpose_fires_nothing(tmp_path: Path) -> None:
    at_rest = {f"up{L}": "1x180", UP: "1x180", 'hvd_serving{instance="w"}': "1x180"}
    _run(tmp_path, [
        fires(name, at_rest | dict([series.rsplit("  ", 1)]), set(), *range(0, 180, 10))
        for name, series in ON_PURPOSE.items()
    ])  # fmt: skip


def _run(folder: Path, tests: list[dict[str, Any]]) -> None:
    file = folder / "alerts.test.yml"
    rules = str(PROMETHEUS / "alerts.yml")
    file.write_text(
        json.dumps({"rule_files": [rules], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _written(name: str, case: Case) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'
    found = [(minute, {"{}": value}) for minute, value in ((0, 0), (case.fires, 1), (case.over, 0))]
    return _test(name, case.series, firing, found)


def _test(
    name: str, series: Mapping[str, str], expr: str, found: list[tuple[int, dict[str, int]]]
) -> dict[str, Any]:
    """What ``expr`` shall be, by labels, at each of some minutes."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": s, "values": values} for s, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr, "eval_time": f"{minute}m",
                "exp_samples": [{"labels": k, "value": v} for k, v in samples.items()],
            }
            for minute, samples in found
        ],
    }  # fmt: skip


def test_every_case_is_of_series_as_they_are_shown() -> None:
    labels = shown()
    for name, case in [*CASES.items(), *FURTHER]:
        for series in case.series:
            figure, _, rest = series.partition("{")
            if figure != "up":
                given = set(re.findall(r"(\w+)=", rest)) - {"job", "instance"}
                assert given <= labels[figure], (name, series, labels[figure])


def test_a_scope_is_somebodys_from_as_many_drafts_as_the_alert_says() -> None:
    assert f">= {ESTABLISHED}" in ALERTS["HvdNobodyHoldsTheLease"]["expr"]


def targets(folder: Path) -> dict[str, list[dict[str, str]]]:
    """The labels under which Prometheus scrapes the pods of each overlay, by the shipped file."""
    shipped = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())
    (job,) = shipped["scrape_configs"]
    (found,) = job.pop("kubernetes_sd_configs")
    assert found == {"role": "pod", "namespaces": {"names": ["hvd"]}}
    job["static_configs"] = [each for overlay in OVERLAYS for each in discovered(overlay)]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    told = subprocess.run(
        ["promtool", "check", "service-discovery", "--timeout=1s", file, job["job_name"]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept: dict[str, list[dict[str, str]]] = {overlay: [] for overlay in OVERLAYS}
    for one in json.loads(told.stdout):
        if one["labels"]:
            labels = {k: v for k, v in one["labels"].items() if not k.startswith("__")}
            kept[one["discoveredLabels"]["__overlay"]].append(labels)
    return {overlay: sorted(each, key=str) for overlay, each in kept.items()}


def discovered(overlay: str) -> Iterator[dict[str, Any]]:
    """What Prometheus finds of an overlay's pods: each of their ports."""
    for document, template in pods(built(overlay)):
        assert document["metadata"]["namespace"] == "hvd"
        for number in range(document["spec"]["replicas"]):
            address = f"{document['metadata']['name']}-{number}"
            for container in containers(template):
                for port in container.get("ports", [{"name": "", "containerPort": 80}]):
                    meta = {
                        "namespace": "hvd", "pod_name": address, "pod_phase": "Running",
                        "pod_container_port_name": port["name"],
                    }  # fmt: skip
                    for key, value in template["metadata"]["labels"].items():
                        meta["pod_label_" + re.sub(r"\W", "_", key)] = value
                    labels = {f"__meta_kubernetes_{key}": value for key, value in meta.items()}
                    at = [f"{address}:{port['containerPort']}"]
                    yield {"targets": at, "labels": labels | {"__overlay": overlay}}


@needs_promtool
@needs_kubectl
def test_nothing_fires_at_rest_under_the_names_that_the_manifests_give(tmp_path: Path) -> None:
    named, tests = targets(tmp_path), []
    for overlay, found in named.items():
        jobs = ["hvd-intake"] * (overlay == "intake") + ["hvd-learner", "hvd-worker"]
        assert sorted({one["job"] for one in found}) == jobs
        assert len(found) == len({one["instance"] for one in found}) == 2 * len(jobs)
        if overlay != OVERLAYS[0] and found == named[OVERLAYS[0]]:
            continue  # what is scraped under the same names fires alike
        rests = {series: f"{value}x60" for series, value in scraped(found).items()}
        up = [_series("up", one) for one in found]
        starting = _series("up", {"job": "hvd-worker", "instance": "hvd-worker-new"})
        fresh = {up[0]: "0x30 1x30", starting: "_x30 0x30"}  # a start takes half an hour at most
        for name, series in ("rests", rests), ("starts", {**rests, **fresh}):
            tests.append(fires(name, series, set(), *range(0, 60, 5)))
        broken = {**rests, **dict.fromkeys(up, "1x5 0x55")}
        down = {"HvdWorkerDown", "HvdLearnerDown"} | (
            {"HvdIntakesDown"} if overlay == "intake" else set()
        )
        tests.append(fires("broken", broken, down, 15))
    _run(tmp_path, tests)


def scraped(found: list[dict[str, str]]) -> dict[str, str]:
    """What each target shows at rest, by series."""
    all_pages, series = pages(), {}
    for one in found:
        series[_series("up", one)] = "1"
        for family in text_string_to_metric_families(all_pages[one["job"]]):
            for sample in family.samples:
                if one["job"] == "hvd-intake" and "scope" in sample.labels:
                    continue  # an intake has none
                labels = {**sample.labels, **one}
                labels |= {"worker": one["instance"]} if "worker" in labels else {}
                series[_series(sample.name, labels)] = f"{sample.value:f}"
    return series


def _series(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def fires(name: str, series: Mapping[str, str], alerts: set[str], *minutes: int) -> dict[str, Any]:
    """That ``alerts`` and no others fire at each of some minutes."""
    expr = 'count by (alertname) (ALERTS{alertstate="firing"}) * 0'
    found = {f'{{alertname="{alert}"}}': 0 for alert in sorted(alerts)}
    return _test(name, series, expr, [(minute, found) for minute in minutes])


@needs_promtool
def test_the_shipped_configuration_is_sound() -> None:
    for command in ("check", "config"), ("check", "rules"):
        name = "prometheus.yml" if command[1] == "config" else "alerts.yml"
        done = subprocess.run(
            ["promtool", *command, PROMETHEUS / name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "file", ["deploy/prometheus/alerts.yml", "deploy/grafana/hvd.json", "docs/operations.md"]
)
def test_every_figure_that_is_named_is_shown(file: str) -> None:
    named = set(
        re.findall(r"(?<!vllm_xargs\.)\bhvd_[a-z0-9_]*[a-z0-9]\b", (ROOT / file).read_text())
    )
    assert len(named) > 20 and named <= shown().keys()


AT_REST = "a-worker-at-rest"


def pages() -> dict[str, str]:
    """What processes show at rest, by job: of a scope with too few drafts to be anybody's."""
    worker = WorkerStatus(
        process=AT_REST, scope="s", time=1e9, publication=1, policy_version=1,
        sides={"on": SideSums()},
        **{name: {"some": 0} for name in told.COUNTS_BY},
    )  # fmt: skip
    told.publish(worker, None)
    registry = CollectorRegistry()
    counts = {"refusals": {"some": 0}, "given_up": {"some": 0}, "losses": {"some": 0}}
    learner = LearnerStatus(
        process="l", scope="s", time=1e9, publication=1, drafts_consumed=ESTABLISHED - 1,
        verdicts={"some": 0}, **counts,
    )  # fmt: skip
    registry.register(learned.StatusCollector(lambda: [learner]))
    # The client has one registry a process: what other tests published is not this worker's.
    mine = [
        line
        for line in generate_latest().decode().splitlines(keepends=True)
        if line.startswith("#") or f'worker="{AT_REST}"' in line
    ]
    return {
        "hvd-worker": "".join(mine),
        "hvd-learner": generate_latest(registry).decode(),
        "hvd-intake": generate_latest(registry).decode(),
    }


def shown() -> dict[str, set[str]]:
    """The names of the labels of each of our series, those of its target left out."""
    return {
        sample.name: set(sample.labels)
        for page in pages().values()
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("hvd_") and not sample.name.endswith("_created")
    }
