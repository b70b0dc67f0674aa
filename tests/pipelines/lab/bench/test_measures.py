"""What a step and a learner cost: each is fed what a worker would be."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.lab.bench import step_cost
from pipelines.lab.bench.learner import RECORD


def test_the_command_prints_what_it_measured() -> None:
    done = CliRunner().invoke(app, ["bench", "learner", "--events", "10000", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for run in (found, found["ten_scopes"]):
        assert run["events"] == -(-10_000 // RECORD) * RECORD and run["events_per_s"] > 0
        assert run["rss_mb"] >= run["rss_mb_after_1m"] > 0
    assert (found["scopes"], found["ten_scopes"]["scopes"]) == (1, 10)


def test_a_step_has_every_part_of_ours_in_it_and_prompts_are_waited_for() -> None:
    whole = step_cost.measure(20, long_prompts=1, beside=5)
    assert set(whole["us_by_verb"]) == {"observe", "choose", "drafted", "settle", "adapter"}
    assert all(us > 0.0 for us in whole["us_by_verb"].values())
    assert whole["tokens_per_cycle"] > 1.2 and whole["longest_wait_for_a_prompt_ms"] > 0.0
    shown = CliRunner().invoke(app, ["bench", "decide", "--steps", "20"])
    assert shown.exit_code == 0 and "us by verb observe" in shown.output, shown.output
