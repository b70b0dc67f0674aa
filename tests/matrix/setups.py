"""The servers of the matrix: plain vLLM, and the plugin under each speculative configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from decoder.contracts.bundle import frequency_policy
from decoder.policy.probes import to_bytes
from decoder.scope_id import scope_of
from pipelines import embedded, machine
from pipelines.lab.bench.serve.setups import Setup as Stock
from pipelines.lab.bench.serve.setups import command
from pipelines.serve.command import METRICS_VARIABLE, ServeOptions, chosen, serve_command
from tests.matrix.asks import CONTEXT
from tests.server import Server, serving

TOGETHER: Final = 12
"""Requests under way."""
LIMITS: Final = (
    f"--max-model-len {CONTEXT} --max-num-seqs 8 --max-num-batched-tokens 512 "
    # Room for less than eight requests at their longest: some are preempted.
    "--block-size 32 --num-gpu-blocks-override 26 "
    "--enable-auto-tool-choice --tool-call-parser hermes"
)


@dataclass(frozen=True)
class Setup:
    """A speculative configuration under the plugin; ``drafts`` is the longest that vLLM counts."""

    name: str
    method: str
    number: int | None = None

    @property
    def drafts(self) -> int:
        """vLLM takes the depth of its own suffix trees where no number is given."""
        return self.number or 24

    @property
    def drafter(self) -> str | None:
        """The EAGLE3 head, where the method has one."""
        return str(embedded.DRAFTER) if self.method == "eagle3" else None

    @property
    def speculative_config(self) -> dict[str, Any]:
        """As an operator writes it."""
        number = {} if self.number is None else {"num_speculative_tokens": self.number}
        if self.method == "suffix":
            return {"method": "suffix", **number}
        head = {"method": "eagle3", "model": self.drafter, **number}
        return {**head, "disable_padded_drafter_batch": True, "disable_eagle_block_drop": True}


SETUPS: Final = (
    Setup("suffix", "suffix"),
    *(Setup(f"eagle3-{k}", "eagle3", k) for k in (3, 16, 64)),
)


def _options(port: int, drafter: str | None) -> ServeOptions:
    return chosen(None, drafter or "none", "127.0.0.1", port, "float32", LIMITS.split())


def _environment(folder: Path) -> dict[str, str]:
    metrics = folder / "metrics"
    metrics.mkdir()
    return os.environ | {METRICS_VARIABLE: str(metrics), "VLLM_CPU_KVCACHE_SPACE": "1"}


@contextmanager
def plain(folder: Path) -> Iterator[Server]:
    """vLLM without the plugin and without speculation."""
    port = machine.free_port()
    options, nothing = _options(port, None), Stock("none", "none")
    arguments, environment = command(
        nothing, options, _environment(folder), machine.cpu_flags(), on_cpu=True
    )
    with serving(arguments, environment, port, folder / "server.log") as server:
        yield server


@contextmanager
def hybrid(setup: Setup, folder: Path) -> Iterator[Server]:
    """vLLM with the plugin; counting decides, and alone, so that every arm is verified often."""
    port = machine.free_port()
    options = _options(port, setup.drafter)
    arguments, environment = serve_command(
        options, _environment(folder), machine.cpu_flags(), on_cpu=True
    )
    arguments[arguments.index("--speculative-config") + 1] = json.dumps(setup.speculative_config)
    policy = folder / "counting.safetensors"
    scope = scope_of(options.model, setup.drafter)
    policy.write_bytes(to_bytes(frequency_policy(scope, 1.5)))
    environment |= {
        "HVD_WORKER_TELEMETRY": "0",
        "HVD_WORKER_POLICY_FILE": str(policy),
        "HVD_WORKER_FLOOR": "0",
    }
    with serving(arguments, environment, port, folder / "server.log") as server:
        yield server
