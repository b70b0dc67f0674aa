"""What the serving benchmark counts: servers' counters, and processor time."""

from __future__ import annotations

import subprocess
import sys

from pipelines.bench.serve.counters import Counters, parse, settled
from pipelines.bench.serve.cpu import session_seconds


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
