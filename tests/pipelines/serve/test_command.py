from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from importlib.metadata import entry_points
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
    PLUGIN,
    ServeOptions,
    check,
    chosen,
    empty_metrics,
    metrics_folder,
    serve_command,
)

TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "vocab_size": 49152}
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


def served(options: ServeOptions, on_cpu: bool = True, **environment: str) -> Any:
    """Arguments and environment, on a processor without known flags."""
    return serve_command(options, environment, NO_FLAGS, on_cpu)


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
        "drains": args.shutdown_timeout, "quiet": args.disable_uvicorn_access_log,
        "requests": config.scheduler_config.max_num_seqs,
        "tokens": config.scheduler_config.max_num_batched_tokens,
        "method": config.speculative_config.method,
        "unpadded": config.speculative_config.disable_padded_drafter_batch,
        "shares": config.speculative_config.disable_eagle_block_drop,
        "longest": config.speculative_config.num_speculative_tokens,
        "length": config.model_config.max_model_len,
    })
print(json.dumps(told))
"""
BESIDE = {
    "": {
        "method": "eagle3", "longest": 64, "unpadded": True, "shares": True, "middleware": 2,
        "drains": 5, "quiet": True,
    },
    "--shutdown-timeout=45 --no-disable-uvicorn-access-log --max-num-seqs 300 --max-model-len 64 "
    "--served-model-name mine --middleware of.mine --api-key secret --enable-log-requests "
    "--uds /tmp/none --kv-cache-memory-bytes 1073741824": {
        "drains": 45, "quiet": False, "requests": 300, "length": 64, "name": "mine",
        "middleware": 3,
    },
    "--enable-lora": {"requests": 31, "tokens": 2048},
    "--enable_lora --max_num_seqs=200": {"requests": 200, "tokens": 13_000},
    "--enable-lora --max-num-batched-tokens 4096": {"requests": 63, "tokens": 4096},
    "--no-enable-prefix-caching --no-enable-chunked-prefill": {"tokens": 8192},
    "--speculative-config.num_speculative_tokens 16": {"method": "eagle3", "longest": 16},
    '--speculative-config {"method":"suffix","num_speculative_tokens":8}': {
        "method": "suffix", "longest": 8,
    },
}  # fmt: skip
"""What an operator adds, and what the engine is then configured with."""


@pytest.mark.engine
def test_what_an_operator_adds_goes_with_what_is_there() -> None:
    commands, environment = [], {}
    for extra in BESIDE:
        options = chosen(None, None, "127.0.0.1", 8000, "auto", extra.split())
        arguments, environment = serve_command(options, os.environ, NO_FLAGS, on_cpu=True)
        commands.append(arguments)
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED, json.dumps(commands)],
        env=environment,
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


ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
}  # fmt: skip


def test_what_a_cpu_takes_is_set_there_unless_a_person_asked_for_else(monkeypatch) -> None:
    for flags, dtype in (("avx2 avx512f", "float32"), ("amx_bf16", "bfloat16")):
        monkeypatch.setenv(machine.FLAGS_VARIABLE, flags)  # as on another processor
        options = ServeOptions("owner/model")
        arguments, _ = serve_command(options, {}, machine.cpu_flags(), on_cpu=True)
        assert after(arguments, "--dtype") == dtype
    assert all(load() for load in (KafkaSettings.load, WorkerSettings.load, LearnerSettings.load))
    arguments, env = served(ServeOptions("owner/model", port=8123))
    assert after(arguments, "--port") == "8123" and "--enforce-eager" in arguments
    assert ON_A_CPU.items() <= env.items()
    assert env["HVD_WORKER_ENABLED"] == "1" and "VLLM_USE_V2_MODEL_RUNNER" not in env
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "16", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "OMP_WAIT_POLICY": "ACTIVE", "VLLM_CPU_ATTN_SPLIT_KV": "1",
    }  # fmt: skip
    options = ServeOptions("owner/model", dtype="bfloat16", extra=("--no-enforce-eager",))
    arguments, env = served(options, **own)
    assert after(arguments, "--dtype") == "bfloat16"
    assert "--enforce-eager" not in arguments and arguments[-1] == "--no-enforce-eager"
    assert own.items() <= env.items()
    arguments, env = served(ServeOptions("owner/model"), on_cpu=False)
    assert after(arguments, "--dtype") == "auto" and "--enforce-eager" not in arguments
    assert not ON_A_CPU.keys() & env.keys()


def test_a_servers_metrics_begin_at_zero_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    options = ServeOptions("owner/model", port=8123)
    _, env = served(options)
    folder = Path(env[METRICS_VARIABLE])
    assert folder == metrics_folder(8123) and tmp_path in folder.parents
    folder.mkdir(parents=True)
    (folder / "counter_1.db").write_bytes(b"what an earlier server counted")
    running = folder.with_name("8125")
    running.mkdir()
    empty_metrics(options, env)
    assert [each.name for each in folder.iterdir()] == ["lock"]
    assert running.exists(), "its server may be starting"


def test_the_metrics_of_a_living_server_of_the_same_port_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers have one port number in two network namespaces, and may share /dev/shm."""
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    options = ServeOptions("owner/model", port=8123)
    (_, first), (_, second) = served(options), served(options)
    lives = subprocess.Popen(
        [sys.executable, "-c", LIVES, json.dumps(first), str(tmp_path)], stdout=subprocess.PIPE
    )
    with lives:
        assert lives.stdout is not None and lives.stdout.readline() == b"begun\n"
        counted = metrics_folder(8123) / "counter_1.db"
        counted.write_bytes(b"what a living server counts")
        empty_metrics(options, second)
        assert counted.exists() and second[METRICS_VARIABLE] == f"{metrics_folder(8123)}-2"
        assert Path(second[METRICS_VARIABLE]).is_dir()
        lives.kill()
    (_, third) = served(options)
    empty_metrics(options, third)
    assert not counted.exists() and third[METRICS_VARIABLE] == str(metrics_folder(8123))


LIVES = """
import json, os, pathlib, sys
from pipelines import machine
from pipelines.serve.command import ServeOptions, empty_metrics
machine.SHARED_MEMORY = pathlib.Path(sys.argv[2])
empty_metrics(ServeOptions("owner/model", port=8123), json.loads(sys.argv[1]))
os.execv("/bin/sh", ["sh", "-c", "echo begun; exec sleep 600"])
"""
"""A server: who empties the folder becomes vLLM, which holds it as long as it runs."""


def test_a_vllm_that_loads_named_plugins_alone_loads_ours() -> None:
    (point,) = entry_points(group="vllm.general_plugins", name=PLUGIN)
    assert point.value.startswith("decoder.")
    for given, wanted in (("", PLUGIN), ("a,b", f"a,b,{PLUGIN}"), (PLUGIN, PLUGIN)):
        _, env = served(ServeOptions("owner/model"), VLLM_PLUGINS=given)
        assert env["VLLM_PLUGINS"] == wanted
    assert "VLLM_PLUGINS" not in served(ServeOptions("owner/model"))[1]


def test_a_metrics_folder_that_a_person_named_is_left_alone_or_said_to_be_unusable(
    tmp_path: Path,
) -> None:
    (tmp_path / "counter_1.db").write_bytes(b"")
    _, env = served(ServeOptions("owner/model"), **{METRICS_VARIABLE: str(tmp_path)})
    empty_metrics(ServeOptions("owner/model"), env)
    assert env[METRICS_VARIABLE] == str(tmp_path) and (tmp_path / "counter_1.db").exists()
    with pytest.raises(ProcessError, match=f"/dev/null.*{METRICS_VARIABLE}"):
        empty_metrics(ServeOptions("owner/model"), {METRICS_VARIABLE: "/dev/null"})


def test_the_embedded_model_comes_with_its_name_and_drafter(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    embedded.model_directory().parent.mkdir(parents=True)
    home = checkpoint(embedded.model_directory(), TARGET)
    options = chosen(None, None, "127.0.0.1", 8000, "auto")
    assert options.model == home
    assert options.served_name == "smollm2-135m"
    assert options.drafter == str(embedded.DRAFTER)
    assert chosen(None, "none", "127.0.0.1", 8000, "auto").drafter is None
    assert served(options)[1]["HF_HUB_OFFLINE"] == "1", "it is never looked up elsewhere"
    another = chosen("owner/model", None, "127.0.0.1", 8000, "auto")
    arguments, env = served(another)
    assert (another.drafter, another.served_name) == (None, None) and "HF_HUB_OFFLINE" not in env
    assert json.loads(after(arguments, "--speculative-config"))["method"] == "suffix"


def test_what_is_no_checkpoint_or_port_to_be_had_is_named(tmp_path) -> None:
    port = machine.free_port()
    for name in ("./missing", "~/missing", "missing"):
        with pytest.raises(ModelError, match="missing"):
            check(ServeOptions(name, port=port))
    for config, said in (
        (None, r"No such file.*config\.json"),
        ("{}", "no weights"),
        ("no JSON", r"no checkpoint whose config\.json can be read"),
        ("[]", "no JSON object"),
    ):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(ModelError, match=said):
            check(ServeOptions(str(tmp_path), port=port))
    model = checkpoint(tmp_path / "model", TARGET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ProcessError, match=f"port {port}.*--port"):
            check(ServeOptions(model, port=port))


def test_the_middleware_says_whose_a_request_is_unless_the_operator_wants_it_otherwise(
    monkeypatch,
) -> None:
    arguments, env = served(ServeOptions("owner/model"))
    module, name = MIDDLEWARE.rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module), name), type)
    assert after(arguments, "--middleware") == MIDDLEWARE
    assert env["HVD_WORKER_TENANTS"] == "middleware"
    own = served(ServeOptions("owner/model"), HVD_WORKER_TENANTS="client")[1]
    assert own["HVD_WORKER_TENANTS"] == "client"
    monkeypatch.setenv("HVD_WORKER_ID_KEY", "short")
    with pytest.raises(SettingsError, match="at least 16"):
        check(ServeOptions("owner/model", port=machine.free_port()))
