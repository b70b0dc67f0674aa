from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.errors import ModelError, ProcessError, SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.settings import WorkerSettings
from learner.settings import LearnerSettings
from pipelines import embedded, machine
from pipelines.serve.command import (
    METRICS_VARIABLE,
    MIDDLEWARE,
    ServeOptions,
    check,
    chosen,
    empty_metrics,
    metrics_folder,
    serve_command,
)

TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "vocab_size": 49152}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 576, "vocab_size": 49152}
SMALL = """
unshare --user --map-root-user --mount sh -c 'mount -t tmpfs -o size=$0 none /dev/shm || exit 77
{}; exec "$@"' "$0" "$@"
"""
NO_FLAGS: frozenset[str] = frozenset()


def checkpoint(folder: Path, config: dict[str, object]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_with_a_drafter_both_arms_are_configured() -> None:
    options = ServeOptions("owner/model", "owner/head", port=8123)
    arguments, env = serve_command(options, {}, NO_FLAGS, on_cpu=True)
    assert json.loads(after(arguments, "--speculative-config")) == {
        "method": "eagle3",
        "model": "owner/head",
        "num_speculative_tokens": 64,
        "disable_padded_drafter_batch": True,
        "disable_eagle_block_drop": True,
    }
    assert after(arguments, "--port") == "8123"
    assert env["HVD_WORKER_ENABLED"] == "1"
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "HF_HUB_OFFLINE" not in env


def parsed(arguments: list[str]) -> Any:
    """As vLLM reads them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments[3:])


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_a_fleet_gives_requests_longer_to_end_than_ctrl_c_does() -> None:
    longer = ServeOptions("owner/model", extra=("--shutdown-timeout=45",))
    arguments, _ = serve_command(longer, {}, NO_FLAGS, on_cpu=True)
    assert parsed(arguments).shutdown_timeout == 45


CONFIGURED = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
told = []
for arguments in json.loads(sys.argv[1]):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments[3:])
    validate_parsed_serve_args(args)
    made = AsyncEngineArgs.from_cli_args(args)
    config = made.create_engine_config(UsageContext.OPENAI_API_SERVER)
    told.append({
        "name": args.served_model_name[0], "middleware": len(args.middleware),
        "requests": config.scheduler_config.max_num_seqs,
        "tokens": config.scheduler_config.max_num_batched_tokens,
        "method": config.speculative_config.method,
        "longest": config.speculative_config.num_speculative_tokens,
        "length": config.model_config.max_model_len,
    })
print(json.dumps(told))
"""
BESIDE = {
    "--enable-lora": {"requests": 31, "tokens": 2048},
    "--enable-lora --max-num-seqs 16": {"requests": 16, "tokens": 2048},
    "--enable_lora --max_num_seqs=200": {"requests": 200, "tokens": 13_000},
    "--enable-lora --max-num-batched-tokens 4096": {"requests": 63, "tokens": 4096},
    "--max-num-seqs 300": {"requests": 300},
    "--max-model-len 64": {"length": 64},
    "--no-enable-prefix-caching --no-enable-chunked-prefill": {"tokens": 8192},
    "--speculative-config.num_speculative_tokens 16": {"method": "eagle3", "longest": 16},
    '--speculative-config {"method":"suffix","num_speculative_tokens":8}': {
        "method": "suffix", "longest": 8,
    },
    "--served-model-name mine": {"name": "mine"},
    "--middleware of.mine": {"middleware": 3},
    "--api-key secret --enable-log-requests --uds /tmp/none --kv-cache-memory-bytes 1073741824": {},
}  # fmt: skip
"""What an operator adds, and what the engine is then configured with."""


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_what_an_operator_adds_goes_with_what_is_there() -> None:
    commands, environment = [], {}
    for extra in BESIDE:
        options = chosen(None, None, "127.0.0.1", 8000, "auto", extra.split())
        arguments, environment = serve_command(options, os.environ, NO_FLAGS, on_cpu=True)
        commands.append(arguments)
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED, json.dumps(commands)],
        env=environment | {"HVD_WORKER_ENABLED": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    for (extra, wanted), told in zip(
        BESIDE.items(), json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        assert wanted.items() <= told.items(), (extra, told)


def test_model_and_port_behind_the_dashes_are_what_is_checked_and_kept_apart_by(
    tmp_path: Path,
) -> None:
    model = checkpoint(tmp_path / "model", TARGET)
    extra = ("--port=8123", "--host", "0.0.0.0", "--model", model)
    options = chosen(None, None, "127.0.0.1", 8000, "auto", extra)
    assert (options.port, options.host, options.model) == (8123, "0.0.0.0", model)
    assert options.drafter is None and options.served_name is None
    with pytest.raises(ModelError, match="--model"):
        chosen(None, None, "127.0.0.1", 8000, "auto", ("owner/model",))


@pytest.mark.parametrize(
    ("size", "filled", "ranks"),
    [("64k", "true", "2"), ("8k", "head -c 8k /dev/zero > /dev/shm/full", "1")],
)
def test_an_engine_without_room_in_shared_memory_is_refused(
    size: str, filled: str, ranks: str
) -> None:
    serve = [
        *(sys.executable, "-m", "pipelines.cli", "serve", "--model", "owner/model"),
        *("--port", str(machine.free_port()), "--", "-tp", ranks),
    ]
    done = subprocess.run(
        ["sh", "-c", SMALL.format(filled), size, *serve],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare:" in done.stderr or done.returncode == 77:
        pytest.skip("this machine lets nobody mount a small /dev/shm")
    assert done.returncode > 0 and "Traceback" not in done.stderr
    assert "/dev/shm" in done.stderr and "--shm-size" in done.stderr


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_no_request_leaves_a_line_in_the_log_unless_it_is_asked_for() -> None:
    plain, _ = serve_command(ServeOptions("owner/model"), {}, NO_FLAGS, on_cpu=True)
    extra = ("--no-disable-uvicorn-access-log",)
    asked, _ = serve_command(ServeOptions("owner/model", extra=extra), {}, NO_FLAGS, on_cpu=True)
    assert parsed(plain).disable_uvicorn_access_log
    assert not parsed(asked).disable_uvicorn_access_log


def test_without_a_drafter_only_the_cache_drafts() -> None:
    arguments, _ = serve_command(ServeOptions("owner/model"), {}, NO_FLAGS, on_cpu=True)
    assert json.loads(after(arguments, "--speculative-config")) == {
        "method": "suffix",
        "num_speculative_tokens": 64,
    }


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (frozenset({"avx2"}), "float32"),
        (frozenset({"avx2", "avx512f"}), "float32"),
        (frozenset({"avx2", "avx512_bf16"}), "bfloat16"),
        (frozenset({"amx_bf16"}), "bfloat16"),
    ],
)
def test_a_cpu_serves_in_the_format_it_is_fast_in(flags: frozenset[str], dtype: str) -> None:
    arguments, _ = serve_command(ServeOptions("owner/model"), {}, flags, on_cpu=True)
    assert after(arguments, "--dtype") == dtype


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx2", "float32"), ("avx2 avx512_bf16", "bfloat16")]
)
def test_auto_can_be_tried_as_on_another_processor(monkeypatch, flags: str, dtype: str) -> None:
    monkeypatch.setenv(machine.FLAGS_VARIABLE, flags)
    assert machine.serving_dtype(machine.cpu_flags()) == dtype
    check_settings = (KafkaSettings.load, WorkerSettings.load, LearnerSettings.load)
    assert all(load() for load in check_settings), "no process refuses the variable"


def test_what_a_person_asked_for_wins() -> None:
    options = ServeOptions("owner/model", dtype="bfloat16", extra=("--no-enforce-eager",))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "16", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments, env = serve_command(options, environment, NO_FLAGS, on_cpu=True)
    assert after(arguments, "--dtype") == "bfloat16"
    assert "--enforce-eager" not in arguments
    assert arguments[-1] == "--no-enforce-eager"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "16"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_a_gpu_keeps_vllms_own_choices() -> None:
    arguments, env = serve_command(ServeOptions("owner/model"), {}, NO_FLAGS, on_cpu=False)
    assert after(arguments, "--dtype") == "auto"
    assert "--enforce-eager" not in arguments
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in env


def test_a_servers_metrics_begin_at_zero_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    options = ServeOptions("owner/model", port=8123)
    _, env = serve_command(options, {}, NO_FLAGS, on_cpu=True)
    folder = Path(env[METRICS_VARIABLE])
    assert folder == metrics_folder(8123) and tmp_path in folder.parents
    folder.mkdir(parents=True)
    (folder / "counter_1.db").write_bytes(b"what an earlier server counted")
    old, running = folder.with_name("8124"), folder.with_name("8125")
    old.mkdir()
    running.mkdir()
    os.utime(old, (0, 0))
    empty_metrics(options, env)
    assert folder.is_dir() and not any(folder.iterdir())
    assert not old.exists(), "nobody uses it any more"
    assert running.exists(), "its server may be starting"


def test_metrics_lie_on_a_disk_where_there_is_no_folder_in_memory_for_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert metrics_folder(1).is_relative_to(tmp_path / "hybrid-verified-decoding")
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    assert not metrics_folder(1).is_relative_to(tmp_path / "hybrid-verified-decoding")
    other = os.getuid() + 1
    (tmp_path / f"hybrid-verified-decoding-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)  # for whom that folder is somebody else's
    assert metrics_folder(1).is_relative_to(tmp_path / "hybrid-verified-decoding")


def test_a_metrics_folder_that_a_person_named_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").write_bytes(b"")
    named = {METRICS_VARIABLE: str(tmp_path)}
    options = ServeOptions("owner/model")
    _, env = serve_command(options, named, NO_FLAGS, on_cpu=True)
    empty_metrics(options, env)
    assert env[METRICS_VARIABLE] == str(tmp_path)
    assert (tmp_path / "counter_1.db").exists()


@pytest.mark.parametrize("named", ["/proc/none", "/dev/null"])
def test_a_metrics_folder_that_cannot_be_written_is_named(named: str) -> None:
    options = ServeOptions("owner/model")
    _, env = serve_command(options, {METRICS_VARIABLE: named}, NO_FLAGS, on_cpu=True)
    with pytest.raises(ProcessError, match=f"{named}.*{METRICS_VARIABLE}"):
        empty_metrics(options, env)


READ_ONLY = """
unshare --user --map-root-user --mount sh -c 'for folder in /tmp /var/tmp /dev/shm; do
mount --bind $folder $folder && mount -o remount,bind,ro $folder || exit 77; done
cd /proc; exec "$@"' sh "$@"
"""


@pytest.mark.parametrize(
    ("before", "word"),
    [
        (("sh", "-c", READ_ONLY, "sh"), "TMPDIR"),
        (("setpriv", "--reuid=2147483", "--clear-groups"), "set HOME"),
    ],
)
def test_nowhere_to_keep_anything_is_one_sentence(before: tuple[str, ...], word: str) -> None:
    if subprocess.run([*before, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may neither mount nor become another")
    environment = {
        name: value for name, value in os.environ.items()
        if name not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")
    }  # fmt: skip
    done = subprocess.run(
        [*before, sys.executable, "-m", "pipelines.cli", "serve", "--model", "owner/model",
         "--port", str(machine.free_port())],
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode > 0 and word in done.stderr and "Traceback" not in done.stderr


def test_a_local_model_is_never_looked_up_elsewhere(tmp_path) -> None:
    model = checkpoint(tmp_path / "model", TARGET)
    assert serve_command(ServeOptions(model), {}, NO_FLAGS, True)[1]["HF_HUB_OFFLINE"] == "1"


def test_another_model_runs_without_the_embedded_drafter() -> None:
    options = chosen("owner/model", None, "127.0.0.1", 8000, "auto")
    assert (options.drafter, options.served_name) == (None, None)
    assert chosen("owner/model", "none", "127.0.0.1", 8000, "auto").drafter is None


def test_the_embedded_model_comes_with_its_name_and_drafter(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    embedded.model_directory().parent.mkdir(parents=True)
    home = checkpoint(embedded.model_directory(), TARGET)
    options = chosen(None, None, "127.0.0.1", 8000, "auto")
    shipped = embedded.drafter_path()
    assert options.model == home
    assert options.served_name == "smollm2-135m"
    assert options.drafter == (str(shipped) if shipped else None)
    assert chosen(None, "none", "127.0.0.1", 8000, "auto").drafter is None


@pytest.mark.parametrize(
    ("change", "word"),
    [({"hidden_size": 1024}, "hidden size"), ({"vocab_size": 32000}, "vocabulary")],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, change, word) -> None:
    model = checkpoint(tmp_path / "model", TARGET)
    head = checkpoint(tmp_path / "head", {**HEAD, **change})
    with pytest.raises(ModelError, match=f"does not fit.*{word}"):
        check(ServeOptions(model, head, port=machine.free_port()))


def test_a_model_is_no_drafter(tmp_path) -> None:
    model = checkpoint(tmp_path / "model", TARGET)
    with pytest.raises(ModelError, match="not an EAGLE3 head"):
        check(ServeOptions(model, model, port=machine.free_port()))


def test_a_fitting_pair_passes(tmp_path) -> None:
    model, head = checkpoint(tmp_path / "model", TARGET), checkpoint(tmp_path / "head", HEAD)
    check(ServeOptions(model, head, port=machine.free_port()))


@pytest.mark.parametrize("name", ["/missing", "./missing", "~/missing", "missing"])
def test_a_model_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelError, match="missing"):
        check(ServeOptions(name, port=machine.free_port()))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        check(ServeOptions(str(tmp_path), port=machine.free_port()))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        check(ServeOptions(str(tmp_path), port=machine.free_port()))
    (tmp_path / "config.json").write_text("not JSON")
    with pytest.raises(ModelError, match="cannot be read"):
        check(ServeOptions(str(tmp_path), port=machine.free_port()))


def test_a_taken_port_is_named(tmp_path) -> None:
    model = checkpoint(tmp_path / "model", TARGET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ProcessError, match=f"port {port}.*--port"):
            check(ServeOptions(model, port=port))


def test_a_misspelt_setting_is_refused_before_anything_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HVD_WORKER_QUEUE_SIZ", "10")
    with pytest.raises(SettingsError, match="HVD_WORKER_QUEUE_SIZE"):
        check(ServeOptions(checkpoint(tmp_path / "model", TARGET), port=machine.free_port()))


def test_the_middleware_says_whose_a_request_is_unless_the_operator_wants_it_otherwise() -> None:
    import importlib

    arguments, env = serve_command(ServeOptions("owner/model"), {}, NO_FLAGS, on_cpu=True)
    module, name = after(arguments, "--middleware").rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module), name), type)
    assert f"{module}.{name}" == MIDDLEWARE
    assert env["HVD_WORKER_TENANTS"] == "middleware"
    own = {"HVD_WORKER_TENANTS": "client"}
    _, env = serve_command(ServeOptions("owner/model"), own, NO_FLAGS, on_cpu=True)
    assert env["HVD_WORKER_TENANTS"] == "client"


def test_a_key_that_is_too_short_is_refused_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVD_WORKER_ID_KEY", "short")
    with pytest.raises(SettingsError, match="at least 16"):
        check(ServeOptions("owner/model", port=machine.free_port()))
