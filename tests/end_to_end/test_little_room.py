"""A real server where memory, disks and descriptors are short, and one whose API is killed."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from pipelines import embedded, machine
from pipelines.serve.command import METRICS_VARIABLE
from pipelines.stack.running import HVD
from tests import conftest
from tests.server import PATIENCE_S, Server, serving

until = partial(conftest.until, seconds=PATIENCE_S)
pytestmark = [pytest.mark.long, pytest.mark.engine]

SMALL = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNT = 'mount -t tmpfs -o size=$0 none /dev/shm && mkdir /dev/shm/figures && {} exec "$@"'
RANK = 4


@pytest.fixture(autouse=True)
def _may_mount() -> None:
    if subprocess.run([*SMALL, MOUNT.format(""), "64k", "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a small /dev/shm")


def adapter(folder: Path) -> Path:
    """One of nothing but zeros, which changes no token."""
    config = json.loads((embedded.ensure_model() / "config.json").read_text())
    width = config["hidden_size"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (RANK, width), "B": (width, RANK)}
    folder.mkdir()
    save_file(
        {name.format(part): np.zeros(shape, np.float32) for part, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]})
    )
    return folder


def ask(server: Server, model: str = embedded.SERVED_NAME) -> str:
    asked = {"model": model, "prompt": "One, two, three, one, two, three, one,", "max_tokens": 16,
             "temperature": 0}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def test_figures_without_room_end_nothing_nor_do_adapters_and_no_engine_outlives_its_api(
    tmp_path: Path,
) -> None:
    port = machine.free_port()
    environment = os.environ | {
        "HVD_WORKER_TELEMETRY": "false", "VLLM_CPU_KVCACHE_SPACE": "1",
        METRICS_VARIABLE: "/dev/shm/figures",
    }  # fmt: skip
    arguments = [
        *SMALL, MOUNT.format(""), "64k", *HVD, "serve", "--port", str(port), "--",
        "--enable-lora", "--lora-modules", f"zeros={adapter(tmp_path / 'zeros')}",
    ]  # fmt: skip
    with serving(arguments, environment, port, tmp_path / "log") as server:
        plain = ask(server)
        assert plain and ask(server, "zeros") == plain
        until(lambda: "No space left" in server.log())
        below = psutil.Process(server.child.process.pid).children(recursive=True)
        assert any("EngineCore" in process.name() + process.cmdline()[0] for process in below)
        server.child.process.kill()
        server.child.process.wait()
        until(lambda: not any(process.is_running() for process in below), "the engine's end")


def test_a_server_in_a_container_that_may_write_next_to_nothing(tmp_path: Path) -> None:
    port = machine.free_port()
    nowhere = "/proc/none"
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "XDG_CACHE_HOME": str(machine.cache_directory().parent),
        "HOME": nowhere, "NUMBA_CACHE_DIR": nowhere, "VLLM_CACHE_ROOT": nowhere,
        "HVD_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }  # fmt: skip
    filled = "head -c 900k /dev/zero > /dev/shm/others && ulimit -n 512 &&"
    arguments = [
        *SMALL, MOUNT.format(filled), "1m", *HVD, "serve", "--port", str(port), "--drafter", "none",
    ]  # fmt: skip
    with serving(arguments, environment, port, tmp_path / "log") as server:
        assert ask(server)
        until(lambda: server.metric("hvd_tokens_total"), "figures of the worker")
        told = "does not accept this worker's telemetry"
        until(lambda: told in server.log(), "what its exporter says")
        below = psutil.Process(server.child.process.pid).children(recursive=True)
        [engine] = [p for p in below if "EngineCore" in "".join(p.cmdline())]
        engine.kill()
        until(lambda: not any(process.is_running() for process in below), "the end of the rest")
