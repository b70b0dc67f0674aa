"""What the processes of a deployment show to Prometheus while nothing happens."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from decoder.contracts.status import LearnerStatus, SideSums, WorkerStatus
from decoder.telemetry import metrics as told
from learner import metrics as learned
from learner.loop import ESTABLISHED

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
