"""``hvd bench gpu``; ``python -m pipelines.lab.bench.gpu`` is the same without typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gpu(
    device: Annotated[str, typer.Option(help="cuda, cuda:1 or cpu.")] = "cuda",
    shapes: Annotated[
        str, typer.Option(help="Groups (paper, embedded, tiny) or names, with commas.")
    ] = "embedded,paper",
    dtypes: Annotated[
        str | None, typer.Option(help="The first is that of the cost tables.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for everything.")] = 9.5,
    as_json: Annotated[Path, typer.Option("--json", help="Where the report goes.")] = Path(
        "reports/bench/gpu.json"
    ),
    decode: Annotated[bool, typer.Option(help="Decode with the embedded model, too.")] = True,
    each: Annotated[int, typer.Option(min=1, help="Prompts of each workload to decode.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 96,
    model: Annotated[str | None, typer.Option(help="Target to decode with.")] = None,
    drafter: Annotated[str | None, typer.Option(help="EAGLE3 head made for it.")] = None,
    policy: Annotated[str | None, typer.Option(help="Bundle the hybrid decides by.")] = None,
) -> None:
    """Verification and drafting cost tables on a GPU, and the decode benchmark there.

    Weights are random: costs depend on shapes, not on weights. Needs torch; the decode part needs
    the project's packages and says which are missing. On a CPU only --shapes tiny runs, to try the
    script. Not yet checked on a GPU: graph capture, choice of attention kernels, memory estimate.
    """
    from pipelines.lab.bench.gpu.run import Options, run

    run(
        Options(
            device, shapes, dtypes, minutes, as_json, decode, each, max_tokens, model, drafter,
            policy,
        )
    )  # fmt: skip
