"""The serving benchmark, against server processes that talk like vLLM (``fake_vllm``)."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decoder.contracts.errors import ModelError, ProcessError, SettingsError
from pipelines.bench import serve as bench
from pipelines.bench.prompts import Prompt, PromptSet
from pipelines.bench.serve_counters import Counters, parse, settled
from pipelines.bench.serve_cpu import session_seconds
from pipelines.bench.serve_load import Reply, body, run, token_chunks
from pipelines.bench.serve_prompts import dealt, from_workloads
from pipelines.bench.serve_report import unequal
from pipelines.bench.serve_runs import Journal, Level, ServerRun
from pipelines.bench.serve_setups import Setup, command, setups
from pipelines.bench.serve_summary import summarise, tables
from pipelines.cli import app
from pipelines.serve import ServeOptions

NONE, SUFFIX = Setup("none", "none"), Setup("suffix-k8", "suffix", 8)
EAGLE3, HYBRID = Setup("eagle3-k3", "eagle3", 3, True), Setup("hybrid", "hybrid")
OPTIONS = ServeOptions("owner/model", "owner/head", port=8123, served_name="m")


def asked(text: str, dataset: str = "d") -> Prompt:
    return Prompt(text, dataset, "f", ({"role": "user", "content": text},))


# --- what is started


def test_each_draft_length_is_a_setup_and_eagle3_runs_padded_and_not() -> None:
    made = setups(["hybrid", "eagle3", "suffix", "none"], [3, 5], [8], "head")
    assert [s.name for s in made] == [
        "none", "suffix-k8", "eagle3-k3", "eagle3-k3-unpadded", "eagle3-k5", "eagle3-k5-unpadded",
        "hybrid",
    ]  # fmt: skip


def test_stock_servers_get_vllms_own_configuration() -> None:
    suffix = Setup("suffix-k64", "suffix", 64).speculative_config(None)
    assert suffix == {
        "method": "suffix", "num_speculative_tokens": 64, "suffix_decoding_max_tree_depth": 64,
    }  # fmt: skip
    for padded in (True, False):
        config = Setup("e", "eagle3", 3, padded).speculative_config("head")
        assert config == {
            "method": "eagle3", "model": "head", "num_speculative_tokens": 3,
            "disable_padded_drafter_batch": not padded,
        }  # fmt: skip
    assert NONE.speculative_config("head") is None


def test_servers_differ_in_speculation_alone() -> None:
    environment = {"HVD_WORKER_ENABLED": "1", "PATH": "/bin"}

    def started(setup: Setup) -> tuple[list[str], dict[str, str]]:
        return command(setup, OPTIONS, environment, frozenset(), on_cpu=True, policy=Path("p"))

    (ours, our_env), (plain, plain_env) = started(HYBRID), started(NONE)
    at = ours.index("--speculative-config")
    assert plain == ours[:at] + ours[at + 2 :]
    assert set(our_env.items()) - set(plain_env.items()) == {
        ("HVD_WORKER_ENABLED", "1"),
        ("HVD_WORKER_TELEMETRY", "false"),
        ("HVD_WORKER_POLICY_FILE", str(Path("p").resolve())),
        ("VLLM_USE_V2_MODEL_RUNNER", "0"),
    }
    assert set(plain_env.items()) <= set(our_env.items())
    stock, stock_env = started(SUFFIX)
    assert stock[:at] + stock[at + 2 :] == plain
    assert json.loads(stock[at + 1]) == SUFFIX.speculative_config(None)
    assert stock_env == plain_env


def test_a_runner_the_person_chose_stays_chosen() -> None:
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert (
        command(NONE, OPTIONS, environment, frozenset(), True)[1] | environment
        == (command(NONE, OPTIONS, environment, frozenset(), True)[1])
    )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((["ngram"], [3], [8], "h"), SettingsError, "ngram.*none, suffix, eagle3, hybrid"),
        (([], [3], [8], "h"), SettingsError, "choose from"),
        ((["eagle3"], [3], [8], None), ModelError, "--drafter"),
        ((["suffix"], [3], [], None), SettingsError, "--suffix-k"),
    ],
)
def test_what_cannot_be_compared_is_said(arguments: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        setups(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "1,many"], "--concurrency '1,many'"),
        (["--eagle3-k", "0"], "--eagle3-k '0'"),
        (["--policy", "/nowhere/p.safetensors"], "/nowhere/p.safetensors: no such file"),
    ],
)
def test_options_that_make_no_sense_are_named(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, SettingsError)
    assert words in str(result.exception)


# --- what is sent


def test_every_concurrency_gets_the_same_mix_and_no_prompt_twice() -> None:
    sets = [
        PromptSet(name, "f", tuple(asked(f"{name}{i}", name) for i in range(5))) for name in "ab"
    ]
    problems: list[str] = []
    hands = dealt(sets, 2, 3, lambda p: 1, 10, problems)
    assert [[p.dataset for p in hand] for hand in hands] == [["a", "b", "a"]] * 2
    ids = [p.id for hand in hands for p in hand]
    assert len(set(ids)) == len(ids) == 6
    assert problems == []


def test_prompts_that_do_not_fit_are_replaced_and_counted() -> None:
    lengths = {"a0": 99, "a1": 5, "a2": 5, "a3": 11, "a4": -1}

    def tokens_of(prompt: Prompt) -> int:
        if lengths[prompt.id] < 0:
            raise ValueError("the chat template refuses it")
        return lengths[prompt.id]

    sets = [PromptSet("a", "f", tuple(asked(name, "a") for name in lengths))]
    problems: list[str] = []
    hands = dealt(sets, 1, 3, tokens_of, 10, problems)
    assert [p.id for p in hands[0]] == ["a1", "a2"]
    assert problems == [
        "dataset 'a', prompt 'a4' left out: the chat template refuses it.",
        "dataset 'a': 2 prompts left out, 'a0' the first, for more than --max-prompt-tokens 10.",
        "only 2 of 3 prompts for each concurrency.",
    ]
    with pytest.raises(SettingsError, match="do not go round"):
        dealt(sets, 3, 1, tokens_of, 10, [])


def test_the_projects_own_workloads_serve_where_no_folder_is_named() -> None:
    (tools,) = from_workloads(3, ["tools"])
    assert (tools.name, len(tools.prompts)) == ("tools", 3)
    with pytest.raises(SettingsError, match="toolz"):
        from_workloads(3, ["toolz"])


def test_requests_are_greedy_and_ask_for_token_ids() -> None:
    sent = body(asked("hello"), "m", 7)
    assert (sent["temperature"], sent["max_tokens"], sent["return_token_ids"]) == (0, 7, True)


def test_token_ids_are_read_from_the_stream_and_errors_in_it_raise() -> None:
    lines = ['data: {"choices": [{"delta": {}}]}', "", 'data: {"choices": [{"token_ids": [1, 2]}]}']
    assert list(token_chunks(iter([*lines, "data: [DONE]"]))) == [[1, 2]]
    with pytest.raises(ValueError, match="out of room"):
        list(token_chunks(iter(['data: {"error": {"message": "out of room"}}'])))


def test_as_many_requests_as_asked_for_are_under_way_at_a_time() -> None:
    lock, barrier = threading.Lock(), threading.Barrier(3, timeout=30)
    most = active = 0

    class Meeting(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            nonlocal most, active
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                active += 1
                most = max(most, active)
            barrier.wait()  # nobody is answered before three are here
            with lock:
                active -= 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices": [{"token_ids": [5]}]}\n\n')

    server = ThreadingHTTPServer(("127.0.0.1", 0), Meeting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        prompts = [asked(str(i)) for i in range(9)]
        url = f"http://127.0.0.1:{server.server_port}"
        wall, replies = run(url, "m", prompts, 3, 1)
    finally:
        server.shutdown()
        server.server_close()
    assert most == 3
    assert [r.prompt for r in replies] == [f"d:{i}" for i in range(9)]
    assert all(r.tokens == (5,) and not r.error for r in replies)
    assert 0 < max(r.ttft_s for r in replies) <= max(r.latency_s for r in replies) <= wall


def test_a_server_that_is_not_there_is_an_error_in_the_reply() -> None:
    _, (reply,) = run("http://127.0.0.1:9", "m", [asked("a")], 1, 1)
    assert "ConnectError" in reply.error and reply.tokens == ()


# --- what is counted


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


def level(rate: float, tokens: tuple[int, ...] = (1, 2), concurrency: int = 1) -> Level:
    reply = Reply("d:a", 0.5, 1.5, tokens)
    counters = Counters(tokens=2, drafts=1, drafted=4, accepted=1, steps=1)
    return Level(concurrency, len(tokens) / rate, (reply,), counters, cpu_s=40.0 / rate)


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


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux alone tells")
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


# --- whole runs


def plan(*compared: Setup, rounds: int = 1, max_tokens: int = 6) -> bench.Plan:
    prompts = ((asked("a short one"),), (asked("b"), asked("a prompt of many characters")))
    return bench.Plan(
        compared, OPTIONS, (1, 2), prompts, (asked("w"), asked("ww")), max_tokens, rounds
    )


def launching(
    habits: dict[str, str], started: list[str]
) -> Callable[[bench.Plan, Setup, int], tuple[list[str], dict[str, str]]]:
    def launch(plan: bench.Plan, setup: Setup, port: int) -> tuple[list[str], dict[str, str]]:
        started.append(setup.name)
        habit = habits.get(setup.name, "")
        module = "tests.pipelines.fake_vllm"
        return [sys.executable, "-m", module, str(port), habit], dict(os.environ)

    return launch


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_every_setup_is_measured_at_every_concurrency_in_every_round(tmp_path: Path) -> None:
    started: list[str] = []
    out = tmp_path / "new" / "serve.json"
    made = bench.run(plan(NONE, HYBRID, rounds=2), out, quiet(), launching({}, started))
    assert started == ["none", "hybrid", "none", "hybrid"]
    assert json.loads(out.read_text()) == made
    assert [(r["concurrency"], r["configuration"]) for r in made["records"]] == [
        (1, "none"), (1, "hybrid"), (2, "none"), (2, "hybrid"),
    ]  # fmt: skip
    for record in made["records"]:
        assert record["rounds"] == 2
        assert record["tokens"] == 2 * 6 * record["concurrency"]
        assert record["mean_accepted"] == 1.0  # the warm-up is not in it: counters are differences
        assert record["cycles_per_1k"] == 500
        assert record["cpu_s_per_1k"] is None or record["cpu_s_per_1k"] >= 0
        assert record["equal_to_none"] == record["compared_with_none"] == record["requests"]
    assert unequal(made) == []


def test_answers_that_differ_are_counted_and_named(tmp_path: Path) -> None:
    made = bench.run(
        plan(NONE, HYBRID), tmp_path / "o.json", quiet(), launching({"hybrid": "differ"}, [])
    )
    assert unequal(made) == [
        "hybrid at 1: only 0 of 1 answers equal those of 'none' token for token.",
        "hybrid at 2: only 0 of 2 answers equal those of 'none' token for token.",
    ]


def test_a_refused_prompt_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    made = bench.run(
        plan(NONE), tmp_path / "o.json", quiet(), launching({"none": "refuse-long"}, [])
    )
    assert [(r["requests"], r["failed"], r["tokens"]) for r in made["records"]] == [
        (1, 0, 6), (2, 1, 6),
    ]  # fmt: skip


def test_a_server_that_does_not_start_is_passed_over(tmp_path: Path) -> None:
    started: list[str] = []
    out = tmp_path / "o.json"
    made = bench.run(
        plan(NONE, SUFFIX, rounds=2), out, quiet(), launching({"suffix-k8": "die"}, started)
    )
    assert started == ["none", "suffix-k8", "none"]
    assert "no weights to be found" in made["skipped"]["suffix-k8"]
    assert {r["configuration"] for r in made["records"]} == {"none"}


def test_a_run_without_any_server_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    with pytest.raises(ProcessError, match=r"none of 2 requests.*too long for me"):
        bench.run(plan(NONE), out, quiet(), launching({"none": "refuse"}, []))
    assert not out.exists()


def test_ctrl_c_stops_the_server_keeps_what_is_measured_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    children = []
    start = bench.processes.start

    def remembered(*args: Any) -> Any:
        children.append(start(*args))
        return children[-1]

    monkeypatch.setattr(bench.processes, "start", remembered)
    out, whole = tmp_path / "o.json", plan(NONE, HYBRID)
    with pytest.raises(KeyboardInterrupt):
        bench.run(whole, out, quiet(), launching({"hybrid": "interrupt"}, started))
    assert [child.is_alive for child in children] == [False, False]
    assert {r["configuration"] for r in json.loads(out.read_text())["records"]} == {"none"}
    made = bench.run(whole, out, quiet(), launching({}, started))
    assert started == ["none", "hybrid", "hybrid"]
    assert {r["configuration"] for r in made["records"]} == {"none", "hybrid"}


def test_further_setups_and_rounds_join_what_is_measured(tmp_path: Path) -> None:
    started: list[str] = []
    out, launch = tmp_path / "o.json", launching({}, started)
    bench.run(plan(NONE), out, quiet(), launch)
    made = bench.run(plan(NONE, HYBRID, rounds=2), out, quiet(), launch)
    assert started == ["none", "hybrid", "none", "hybrid"]
    assert {(r["configuration"], r["rounds"]) for r in made["records"]} == {
        ("none", 2), ("hybrid", 2),
    }  # fmt: skip
    made = bench.run(plan(HYBRID), out, quiet(), launch)
    assert {r["configuration"] for r in made["records"]} == {"hybrid"}
    assert len(started) == 4


def test_kept_figures_of_another_setting_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    bench.run(plan(NONE), out, quiet(), launching({}, []))
    with pytest.raises(SettingsError, match=r"max_tokens differ.*--json"):
        bench.run(plan(NONE, max_tokens=7), out, quiet(), launching({}, []))


def test_kept_figures_come_back_as_they_were_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "r.jsonl", {"a": 1})
    assert journal.read() == []
    first, second = (ServerRun(i, "none", 1.0, (level(3.0),)) for i in range(2))
    journal.add(first)
    journal.add(second)
    assert journal.read() == [first, second]
    journal.path.write_text(journal.path.read_text()[:-30])
    with pytest.raises(SettingsError, match=r"r\.jsonl:3 is not a measured server.*--json"):
        journal.read()
