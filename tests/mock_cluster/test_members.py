"""Members of a group that start again, and groups of releases that run side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from kafka.coordinator.assignors.range import RangePartitionAssignor

from decoder.contracts.topics import LESSONS
from learner.ingest import group
from learner.ingest.group import GroupMember
from tests.conftest import until
from tests.learner.stage import WARNINGS
from tests.mock_cluster.cluster import running

pytestmark = WARNINGS
PARTITIONS = 6
Joins = Callable[..., GroupMember]


class Member(NamedTuple):
    """As the client has it of a broker."""

    member_id: str
    group_instance_id: str | None
    metadata: Any


@pytest.fixture
def joins() -> Iterator[Joins]:
    """Makes members of a group on one cluster, which leave at the end."""
    with ExitStack() as stack, running(more={LESSONS.name: PARTITIONS}) as cluster:

        def join(instance: str = "") -> GroupMember:
            made = GroupMember(cluster.kafka, LESSONS, "test", commits=False, instance=instance)
            stack.callback(made.close)
            return made

        yield join


def wait(done: Callable[[], bool], *members: GroupMember) -> None:
    def turn() -> None:
        for each in members:
            each.update()

    until(done, "their parts", turn=turn)


def test_releases_with_different_feature_schemas_each_read_every_partition(
    joins: Joins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one group, what a release passes over would be committed behind for both."""
    old = joins()
    monkeypatch.setattr(group, "SCHEMA_ID", "hvd.features.v3-00000000")
    new = joins()
    wait(lambda: len(old.assignment.owned) == len(new.assignment.owned) == PARTITIONS, old, new)


def test_a_restarted_static_member_keeps_its_partitions(
    joins: Joins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mock cluster knows no static members: what the client asks of a broker that does, and
    what it deals out to members by their names."""
    opened: list[dict[str, Any]] = []
    open_consumer = group.open_consumer

    def recorded(*arguments: Any, **options: Any) -> Any:
        opened.append(options)
        return open_consumer(*arguments, **options)

    monkeypatch.setattr(group, "open_consumer", recorded)
    named, anonymous = joins("c d/\u00e9"), joins()
    wait(lambda: bool(named.assignment.owned and anonymous.assignment.owned), named, anonymous)
    static, dynamic = sorted(opened, key=lambda options: "group_instance_id" not in options)
    assert "group_instance_id" not in dynamic
    assert re.fullmatch(r"[a-z0-9]+", static["group_instance_id"]), "of whatever it is named"
    assert static["session_timeout_ms"] > 3 * dynamic["session_timeout_ms"], "time to start again"

    def dealt(lives: Sequence[str], instances: Sequence[str | None]) -> list[Any]:
        metadata = RangePartitionAssignor.metadata([LESSONS.name])
        members = [
            Member(life, name, metadata) for life, name in zip(lives, instances, strict=True)
        ]
        topic = SimpleNamespace(partitions_for_topic=lambda name: set(range(12)))
        parts = RangePartitionAssignor.assign(topic, members)
        return [parts[life].partitions() for life in lives]

    names = ("a", "b", "c")
    before = dealt(["x1", "x2", "x3"], names)
    assert dealt(["x1", "x9", "x3"], names) == before != dealt(["x9", "x2", "x3"], [None] * 3)
