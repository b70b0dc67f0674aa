"""What the serving benchmark counts: servers' counters, processor time, figures by hand."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from pipelines.bench.serve.counters import Counters, parse, settled
from pipelines.bench.serve.cpu import session_seconds
from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.passes import Level, ServerRun
from pipelines.bench.serve.setups import Setup
from pipelines.bench.serve.summary import summarise, tables
from tests.pipelines.bench.serve.served import EAGLE3, HYBRID, NONE, SUFFIX, level


def test_counters_of_all_engines_are_added_up_and_absent_ones_are_zero() -> None:
    page = (
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="m"} 10.0\n'
        'vllm:generation_tokens_total{engine="1",model_name="m"} 5.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 1.5e+01\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0\n'
        'other:generation_tokens_total{engine="0"} 100.0\n'
    )
    assert parse(page) == Counters(tokens=15, accepted=15)
    assert parse(page).since(Counters(tokens=4, accepted=5)) == Counters(tokens=11, accepted=10)


def test_counters_are_read_again_until_they_hold_what_was_sent() -> None:
    pages = iter([1, 1, 3])
    waited: list[int] = []
    got = settled(
        lambda: f"vllm:generation_tokens_total {next(pages)}", 3, lambda: waited.append(1)
    )
    assert got.tokens == 3 and len(waited) == 2


def test_figures_by_hand() -> None:
    runs = [
        ServerRun(0, "none", 1.0, (level(10.0),)),
        ServerRun(0, "suffix-k8", 1.0, (level(20.0),)),
        ServerRun(0, "eagle3-k3", 1.0, (level(5.0),)),
        ServerRun(0, "hybrid", 1.0, (level(30.0, (1, 9)),)),
        # the second round's machine is half as fast, but for the hybrid
        ServerRun(1, "none", 1.0, (level(5.0),)),
        ServerRun(1, "suffix-k8", 1.0, (level(10.0),)),
        ServerRun(1, "hybrid", 1.0, (level(30.0),)),
    ]
    records = {r["configuration"]: r for r in summarise(runs, [NONE, SUFFIX, EAGLE3, HYBRID])}
    hybrid, eagle3 = records["hybrid"], records["eagle3-k3"]
    assert hybrid["tok_per_s"] == pytest.approx(30.0)
    assert hybrid["ratio_to_none"] == pytest.approx((3.0 + 6.0) / 2)
    assert hybrid["best_fixed"] == "suffix-k8"
    assert hybrid["ratio_to_best_fixed"] == pytest.approx((1.5 + 3.0) / 2)
    assert (hybrid["equal_to_none"], hybrid["compared_with_none"]) == (1, 2)
    assert eagle3["ratio_to_none"] == pytest.approx(0.5)
    assert (eagle3["rounds"], eagle3["equal_to_none"]) == (1, 1)
    assert records["none"]["ratio_to_best_fixed"] == pytest.approx(0.5)
    assert records["none"]["cpu_s_per_1k"] == pytest.approx((2000 + 4000) / 2)
    assert hybrid["cpu_ratio_to_none"] == pytest.approx(hybrid["ratio_to_none"])
    for record in records.values():
        assert record["ms_per_token_p50"] == pytest.approx(1000.0)
        assert record["mean_accepted"] == 1 and record["mean_drafted"] == 4
        assert record["acceptance_rate"] == 0.25
        assert record["cycles_per_1k"] == record["steps_per_1k"] == 500
        assert record["loop_share"] == 0
    json.dumps(list(records.values()), allow_nan=False)
    shown = io.StringIO()
    for table in tables(list(records.values())):
        Console(file=shown, width=200).print(table)
    assert "suffix-k8 *" in shown.getvalue() and "4.50" in shown.getvalue()


def test_a_rate_is_that_of_the_time_when_all_places_were_taken() -> None:
    # Two at a time: a and b begin together, c follows a, d follows b; e follows c and is alone at
    # the end.
    ends = {"a": 2.0, "b": 3.0, "c": 4.0, "d": 5.0, "e": 8.0}
    arrivals = {
        "a": (1.5, 2.0), "b": (2.5, 3.0), "c": (3.5, 4.0), "d": (4.5, 5.0), "e": (5.5, 8.0),
    }  # fmt: skip
    replies = [Reply(n, 0.0, 0.0, (1, 2), "", arrivals[n], ends[n]) for n in ends]
    of = Level(2, 8.0, tuple(replies), Counters())
    assert of.tokens == 10
    assert of.steady == (6, 3.0), "from the end of a to the end of d"
    assert of.rate == 2.0
    few = Level(2, 3.0, tuple(replies[:3]), Counters())
    assert few.steady == (6, 3.0), "three requests, two at a time: counted whole"
    alone = Level(1, 8.5, tuple(replies), Counters())
    assert alone.steady == (10, 8.0)


def test_the_best_draft_length_is_chosen_for_each_concurrency() -> None:
    small, large = Setup("suffix-k8", "suffix", 8), Setup("suffix-k64", "suffix", 64)
    runs = [
        ServerRun(0, "suffix-k8", 1.0, (level(1.0), level(9.0, concurrency=4))),
        ServerRun(0, "suffix-k64", 1.0, (level(2.0), level(8.0, concurrency=4))),
    ]
    best = {
        (r["concurrency"], r["configuration"])
        for r in summarise(runs, [small, large])
        if r["best_of_method"]
    }
    assert best == {(1, "suffix-k64"), (4, "suffix-k8")}


def test_processor_time_is_that_of_all_processes_of_the_server() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    server = subprocess.Popen(
        [sys.executable, "-c", nested],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    server.stdout.readline()
    used = session_seconds(server.pid)
    server.communicate(b"\n")
    assert used is not None and used >= 0.3
    assert session_seconds(server.pid) is None
