"""What the page on telemetry gives an analyst to run runs, on a real topic."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from decoder.contracts.settings import KafkaSettings
from tests.pipelines.telemetry.conftest import folder_of
from tests.pipelines.telemetry.records import HOSTILE, mixed, produce, spread

PAGE = (folder_of("docs") / "telemetry.md").read_text(encoding="utf-8")
TOOLS = ("kcat", "jq")


@pytest.fixture
def filled(empty: KafkaSettings) -> KafkaSettings:
    spread(empty)
    produce(empty, [sent for sent in mixed() if sent[1] not in HOSTILE])
    return empty


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason="apt-get install kcat jq"
)
def test_the_line_of_kcat_prints_a_row_for_each_event(filled: KafkaSettings) -> None:
    (line,) = re.findall(r"```sh\n(kcat.*?)```", PAGE, re.DOTALL)
    there = line.replace("127.0.0.1:9092", filled.bootstrap_servers)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", there],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    rows = [row.split("\t") for row in done.stdout.splitlines()]
    assert len(rows) == 115  # also those that came twice
    assert {tuple(row[:2]) for row in rows} == {
        (workload, arm) for workload in ("edits", "chat") for arm in ("cache", "none")
    }


def test_the_reader_of_a_plain_client_prints_each_event_once(
    filled: KafkaSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder, loop = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    assert len(decoder.splitlines()) < 30 and "decoder" not in decoder + loop
    there = f'bootstrap_servers="{filled.bootstrap_servers}", consumer_timeout_ms=3_000, '
    exec(decoder + loop.replace("auto_offset_reset", there + "auto_offset_reset"), {})
    lines = capsys.readouterr().out.splitlines()
    assert "2 records of one are missing" in lines
    assert len(lines) == 101
