"""What the page on telemetry gives an analyst to run runs, on a real topic."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from decoder.contracts.events import COLUMNS
from decoder.contracts.features import FEATURES
from decoder.contracts.settings import KafkaSettings
from tests.pipelines.telemetry.conftest import folder_of, of_learner
from tests.pipelines.telemetry.records import HOSTILE, mixed, produce, spread

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
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_the_reader_of_a_plain_client_prints_each_event_once(
    empty: KafkaSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    spread(empty)
    produce(empty, [sent for sent in mixed() if sent[1] not in HOSTILE])
    decoder, loop = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    assert len(decoder.splitlines()) < 30 and "decoder" not in decoder + loop
    there = f'bootstrap_servers="{empty.bootstrap_servers}", consumer_timeout_ms=3_000, '
    exec(decoder + loop.replace("auto_offset_reset", there + "auto_offset_reset"), {})
    lines = capsys.readouterr().out.splitlines()
    assert "2 records of one are missing" in lines
    assert len(lines) == 101
