"""``hvd bench gpu``, and ``python -m pipelines.lab.bench.gpu`` where only torch is installed.

Two parts. Cost tables: what verifying and drafting take at the shapes of the paper's three targets
and of the embedded model, by tokens, context and batch. The weights are random: the time of these
dense layers depends on shapes, not on what the weights hold. Then the decode benchmark of the
embedded model through the reference engine, as far as its packages are installed.

Checked on a CPU only, with tiny shapes, where the arithmetic equals that of ``transformers``. Not
checked on a GPU so far: CUDA graph capture, which attention kernels torch chooses, the estimate of
memory, and how much of the grid the time limit leaves.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import HvdError, SettingsError
from pipelines.lab.bench.commas import words
from pipelines.reports import write_json

NOTE: Final = (
    "Random weights: the cost tables depend on shapes, not on weights. Times are medians between "
    "events on the device; tokens chosen by argmax there, nothing copied to the host. 'tokens' of "
    "a verification include the last committed one."
)
COSTS_SHARE: Final = 0.65
"""Of the time, for the cost tables; the rest decodes."""
DTYPES: Final = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Options:
    """What a person chooses; ``dtypes`` None: float16 and bfloat16 on a GPU, float32 on a CPU."""

    device: str = "cuda"
    shapes: str = "embedded,paper"
    dtypes: str | None = None
    minutes: float = 9.5
    json: Path = Path("reports/bench/gpu.json")
    decode: bool = True
    each: int = 2
    max_tokens: int = 96
    model: str | None = None
    drafter: str | None = None
    policy: str | None = None


def run(options: Options) -> dict[str, Any]:
    """Measure, print tables, write ``options.json``.

    Returns:
        the report: ``device, date, versions, note, dtype, shapes, seconds, costs, slopes, decode,
        left_out``.

    Raises:
        SettingsError: a device, shape or dtype that is not there, or a report that cannot be
            written.
    """
    import torch

    from pipelines.lab.bench.gpu import costs as gpu_costs
    from pipelines.lab.bench.gpu import decode as gpu_decode
    from pipelines.lab.bench.gpu.shapes import EMBEDDED, TINY, named

    began = time.monotonic()
    device = _device(options.device)
    dtypes = _dtypes(options.dtypes, device.type)
    try:
        shapes = named(options.shapes)
    except ValueError as error:
        raise SettingsError(f"--shapes: {error}") from error
    if device.type == "cpu" and set(shapes) - set(TINY):
        raise SettingsError(
            "the real shapes need a GPU: on a CPU use --shapes tiny, which only shows that the "
            "script runs."
        )
    deadline = began + 60 * options.minutes
    costs_deadline = began + 60 * options.minutes * (COSTS_SHARE if options.decode else 1.0)
    records: list[dict[str, Any]] = []
    left: list[str] = []
    for index, shape in enumerate(shapes):
        now = time.monotonic()
        until = now + (costs_deadline - now) / (len(shapes) - index)
        grid = gpu_costs.GRIDS["tiny" if shape in TINY else "paper"]
        found, missing = gpu_costs.measure(
            shape, grid, device, getattr(torch, dtypes[0]), until, _say
        )
        records += found
        left += missing
    decoded: dict[str, Any] = {"runs": [], "notes": ["not asked for"]}
    if options.decode:
        asked = gpu_decode.Decode(
            dtypes,
            options.device,
            options.each,
            options.max_tokens,
            model=options.model,
            drafter=options.drafter,
            policy=options.policy,
        )
        mine = [r for r in records if r["shape"] == EMBEDDED.name]
        decoded = gpu_decode.run(asked, mine, deadline, _say)
    itemsize = torch.empty((), dtype=getattr(torch, dtypes[0])).element_size()
    report = {
        "benchmark": "gpu",
        "device": _described(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "note": NOTE,
        "dtype": dtypes[0],
        "shapes": [
            asdict(s) | {"parameters": s.parameters, "read_gb": s.read_parameters * itemsize / 1e9}
            for s in shapes
        ],
        "seconds": time.monotonic() - began,
        "costs": records,
        "slopes": gpu_costs.slopes(records),
        "decode": decoded,
        "left_out": left,
    }
    _print(report)
    write_json(report, options.json)
    return report


def _device(name: str) -> Any:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(
            f"--device {name!r} is none that torch knows: use cuda or cpu."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            f"torch {torch.__version__} sees no CUDA device: run this on a GPU machine, or try the "
            "script with --device cpu --shapes tiny."
        )
    if device.type not in ("cuda", "cpu"):
        raise SettingsError(f"--device {name}: only cuda and cpu are measured.")
    return device


def _dtypes(text: str | None, device: str) -> tuple[str, ...]:
    if text is None:
        return ("float32",) if device == "cpu" else ("float16", "bfloat16")
    found = words(text)
    if not found or set(found) - set(DTYPES):
        raise SettingsError(f"--dtypes {text!r}: choose from {', '.join(DTYPES)}.")
    return found


def _described(device: Any) -> dict[str, Any]:
    import torch

    if device.type == "cpu":
        return {
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
    }


def _versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "transformers", "arctic-inference", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _say(sentence: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {sentence}\n")
    sys.stderr.flush()


def _print(report: dict[str, Any]) -> None:
    lines = [f"{report['device']['name']}, {report['dtype']}, {report['date']}", report["note"], ""]
    lines += _cost_lines(report["costs"])
    lines.append("one token, batch 1: GB of weights read, and GB/s")
    for s in report["shapes"]:
        first = [r for r in report["slopes"] if r["shape"] == s["name"] and r["batch"] == 1][:1]
        lines += [
            f"{s['name']:>14} {s['read_gb']:7.2f} GB {1e3 * s['read_gb'] / r['ms_1']:8.0f} GB/s"
            for r in first
        ]
    lines.append("cost in passes over one token: per further token, tree of 32, draft of 4, tree")
    for s in report["slopes"]:
        parts = (s["per_token"], s["verify_tree"], s["draft_4"], s["draft_tree"])
        shown = "  ".join("   -  " if p is None else f"{p:6.3f}" for p in parts)
        lines.append(f"{s['shape']:>14} batch {s['batch']:>2} context {s['context']:>5}  {shown}")
    for run in report["decode"]["runs"]:
        lines += ["", f"decode, {run['settings']['dtype']}: measured, and computed with graphs"]
        for record in run["overall"]:
            computed = record["computed_with_graphs_tok_per_s"]
            lines.append(
                f"{record['method']:>14}  {record['measured_tok_per_s'] or 0:8.1f} tok/s  "
                + ("" if computed is None else f"{computed:8.1f} tok/s")
            )
    lines += ["", *report["decode"]["notes"], *report["left_out"]]
    sys.stdout.write("\n".join(lines) + "\n")


def _cost_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for shape, step in dict.fromkeys((r["shape"], r["step"]) for r in records):
        mine = [r for r in records if (r["shape"], r["step"]) == (shape, step)]
        tokens = list(dict.fromkeys(r["tokens"] for r in mine))
        lines.append(f"{shape}, {step}: ms by tokens (e: faster without a CUDA graph)")
        lines.append(" " * 24 + "".join(f"{t:>9}" for t in tokens))
        for batch, context in dict.fromkeys((r["batch"], r["context"]) for r in mine):
            row = [r for r in mine if (r["batch"], r["context"]) == (batch, context)]
            cells = "".join(f"{r['ms']:8.2f}{'e' if r['mode'] == 'eager' else ' '}" for r in row)
            lines.append(f"  batch {batch:>3} context {context:>5}{cells}")
        lines.append("")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point without the project's other packages; exit status 2 after one sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.lab.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options()
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--shapes", default=default.shapes, help="groups or names, with commas")
    parser.add_argument("--dtypes", help="the first is that of the cost tables")
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--json", type=Path, default=default.json)
    parser.add_argument("--no-decode", dest="decode", action="store_false")
    parser.add_argument("--each", type=int, default=default.each, help="prompts of a workload")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--model")
    parser.add_argument("--drafter")
    parser.add_argument("--policy")
    try:
        run(Options(**vars(parser.parse_args(arguments))))
    except HvdError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0
