"""What the serving benchmark counts: servers' counters, processor time, steady rates."""

from __future__ import annotations

import subprocess
import sys

from pipelines.bench.serve.counters import Counters, parse, settled
from pipelines.bench.serve.cpu import session_seconds
from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.passes import Level


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
    at_once = {"a": (3.0, 4.0), "b": (3.9, 4.1), "c": (4.15, 4.2), "d": (7.0, 8.0)}
    replies_at_once = tuple(Reply(n, 0.0, 0.0, (1, 2), "", at, at[1]) for n, at in at_once.items())
    short = Level(2, 8.0, replies_at_once, Counters())
    assert short.steady == (8, 8.0), "three of eight tokens in a fortieth of the time"
    alone = Level(1, 8.5, tuple(replies), Counters())
    assert alone.steady == (10, 8.0)


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
