"""Each alert fires on series that show its failure, and is over when they show its end."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from decoder.telemetry import metrics as told
from learner import metrics as learned

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


W, L = '{worker="w"}', '{job="hvd-learner", instance="l"}'
OF_SCOPE = '{job="hvd-learner", instance="l", scope="s"}'
CASES = {
    "HvdWorkerDown": Case({'up{job="hvd-worker", instance="w"}': "1 0x4 1x4"}, 4, 6),
    "HvdPluginSilent": Case(
        {
            'up{job="hvd-worker", instance="w"}': "1x20",
            'hvd_serving{instance="w", worker="w", scope="s"}': "_x10 1x10",
        },
        8,
        12,
    ),
    "HvdEventsLost": Case(
        {
            'hvd_drops_total{worker="w", reason="shed"}': "0+50x40",
            'hvd_events_refused_total{worker="w", reason="TopicAuthorizationFailed"}': "_x2 5x40",
        },
        4,
        30,
    ),
    "HvdEventsSpilling": Case({f"hvd_events_spilled{W}": "0 9x6 0x9"}, 5, 8),
    "HvdCarrierDies": Case({f"hvd_carrier_deaths_total{W}": "0 0 1x30"}, 4, 20),
    "HvdPolicyRefused": Case({'hvd_refusals_total{worker="w", reason="probe"}': "_x2 1x30"}, 4, 20),
    "HvdPolicyBehind": Case(
        {
            f"hvd_publication{W}": "3x9 4x9",
            'hvd_serving{worker="w", scope="s"}': "1x20",
            f"hvd_learner_publication{OF_SCOPE}": "3 4x20",
        },
        8,
        12,
    ),
    "HvdFloorInForce": Case({'hvd_fallback{worker="w", arm="none"}': "0 1x20 0x9"}, 18, 24),
    "HvdFaults": Case({f"hvd_faults_total{W}": "0 0 2x30"}, 4, 20),
    "HvdDecisionSlow": Case({f"hvd_exposed_us_p50{W}": "400 9000x14 400x9"}, 13, 18),
    "HvdLearnerDown": Case({f"up{L}": "1 0x6 1x6"}, 5, 9),
    "HvdLearnerBehind": Case({f"hvd_learner_lag_seconds{L}": "0 300x9 0x9"}, 8, 13),
    "HvdRecordsSkipped": Case({f"hvd_learner_records_skipped_total{L}": "0 0 7x30"}, 4, 20),
    "HvdRecordsRefused": Case(
        {'hvd_learner_records_refused_total{instance="l", reason="range"}': "_x2 1x30"}, 4, 20
    ),
    "HvdLearnerFaults": Case({f"hvd_learner_faults_total{L}": "0 0 1x30"}, 4, 20),
    "HvdLessonsLost": Case(
        {'hvd_learner_events_lost_total{instance="l", scope="s", reason="fault"}': "_x2 7x3 9x30"},
        4,
        20,
    ),
    "HvdRegistryAway": Case({f"hvd_learner_registry_away_seconds{L}": "0 60x6 0x9"}, 5, 9),
    "HvdNobodyHoldsTheLease": Case({f"hvd_learner_holds_lease{OF_SCOPE}": "1 0x6 1x9"}, 5, 9),
    "HvdTwoHoldTheLease": Case(
        {
            'hvd_learner_holds_lease{instance="a", scope="s"}': "1x20",
            'hvd_learner_holds_lease{instance="b", scope="s"}': "0 1x4 0x9",
        },
        4,
        8,
    ),
    "HvdMiscalibrated": Case(
        {
            f"hvd_learner_predicted_tokens_total{OF_SCOPE}": "0+900x60 54000+200x60",
            f"hvd_learner_accepted_tokens_total{OF_SCOPE}": "0+200x120",
        },
        45,
        110,
    ),
    "HvdTrafficKeepsChanging": Case(
        {f"hvd_learner_drifts_total{OF_SCOPE}": "0+1x10 10x120"}, 12, 100
    ),
}

FURTHER = [
    (
        "HvdWorkerDown",
        Case({'up{job="hvd-worker", instance="w"}': "1 1 stale _x8 1x4"}, 6, 13),
    ),
    (
        "HvdEventsLost",
        Case({'hvd_drops_total{worker="w", reason="queue"}': "_x2 5x40"}, 4, 30),
    ),
    (
        "HvdEventsLost",
        Case({'hvd_former_lost_total{worker="w", reason="damaged"}': "_x2 5x40"}, 4, 30),
    ),
    ("HvdEventsLost", Case({f"hvd_former_unread_total{W}": "0 0 1x30"}, 4, 20)),
    (
        "HvdLessonsLost",  # ten minutes after a pause, the same count is no news
        Case(
            {
                'hvd_learner_events_lost_total{instance="l", scope="s", reason="disk"}': (
                    "_x2 9x20 stale _x3 7x30"
                )
            },
            4,
            35,
        ),
    ),
]
"""Another way to the same alert."""


def test_every_alert_has_a_case_and_says_what_to_do() -> None:
    assert CASES.keys() == ALERTS.keys()
    for rule in ALERTS.values():
        assert rule["annotations"]["summary"].endswith(".") and rule["annotations"]["todo"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


@needs_promtool
def test_each_fires_and_is_over(tmp_path: Path) -> None:
    tests = [_written(name, case) for name, case in [*CASES.items(), *FURTHER]]
    file = tmp_path / "alerts.test.yml"
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
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": s, "values": values} for s, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": value}],
            }
            for minute, value in ((0, 0), (case.fires, 1), (case.over, 0))
        ],
    }


@needs_promtool
def test_the_shipped_configuration_is_sound() -> None:
    for command in ("check", "config"), ("check", "rules"):
        name = "prometheus.yml" if command[1] == "config" else "alerts.yml"
        done = subprocess.run(
            ["promtool", *command, PROMETHEUS / name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def figures() -> set[str]:
    """The names of all series that our processes show."""
    worker = {f"{name}_total" for name in (*told.COUNTS, *told.COUNTS_BY)} | told.LEVELS.keys()
    worker |= {"serving", "fallback", "side_tokens_total", "side_seconds_total"}
    learner = {f"{name}_total" for name in (*learned.COUNTS, *learned.SCOPE_COUNTS)}
    learner |= {*learned.LEVELS, *learned.SCOPE_LEVELS}
    learner |= {"records_refused_total", "events_lost_total", "verdicts_total"}
    learner |= {"registry_away_seconds", "lease_known"}
    return {f"hvd_{name}" for name in worker} | {f"hvd_learner_{name}" for name in learner}


@pytest.mark.parametrize(
    "file", ["deploy/prometheus/alerts.yml", "deploy/grafana/hvd.json", "docs/observe.md"]
)
def test_every_figure_that_is_named_is_shown(file: str) -> None:
    named = set(
        re.findall(r"(?<!vllm_xargs\.)\bhvd_[a-z0-9_]*[a-z0-9]\b", (ROOT / file).read_text())
    )
    assert len(named) > 20 and named <= figures()


def test_the_page_lists_every_alert() -> None:
    page = (ROOT / "docs" / "observe.md").read_text()
    assert set(re.findall(r"^\| (Hvd\w+) \|", page, re.MULTILINE)) == ALERTS.keys()
