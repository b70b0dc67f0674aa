"""Cost tables: milliseconds of verifying and drafting, by tokens, context and batch."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from pipelines.lab.bench.gpu.model import random_model
from pipelines.lab.bench.gpu.shapes import Shape
from pipelines.lab.bench.gpu.steps import TREE_TOKENS, Bench, Step, bytes_needed, prepared

MEASURE_SECONDS: Final = 0.1
"""Time spent on each figure, as far as the fewest and the most runs allow."""
FEWEST, MOST = 4, 40
SPARE_BYTES: Final = 2 * 2**30
"""Left free: the allocator's rounding, kernels' workspaces, graphs."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Grid:
    """What is measured of each shape: forward lengths, cached tokens, requests, draft lengths."""

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    draft_k: tuple[int, ...]


GRIDS: Final = {
    "paper": Grid(
        (1, 2, 4, 5, 8, 16, 32, 64, 128),
        (512, 2048, 8192),
        (1, 4, 8, 32),
        (0, 1, 2, 3, 4, 5, 8),
    ),
    "tiny": Grid((1, 2, 4), (16, 40), (1, 2), (0, 1, 3)),
}


def measure(
    shape: Shape, grid: Grid, device: torch.device, dtype: torch.dtype, deadline: float, say: Say
) -> tuple[list[dict[str, Any]], list[str]]:
    """All figures of one shape, batch 1 first, until ``deadline`` (:func:`time.monotonic`).

    Returns:
        records with ``shape, step, batch, context, tokens, eager_ms, graph_ms, ms, mode``, and one
        sentence for whatever was left out. ``tokens`` of a verification are read by the target, of
        a draft made by the head.
    """
    itemsize, most = torch.empty((), dtype=dtype).element_size(), max(grid.tokens)
    weights = (shape.parameters + 2 * shape.layer_parameters) * itemsize
    if not _fits(weights, device):
        return [], [f"{shape.name} left out: its {weights / 1e9:.0f} GB of weights do not fit."]
    say(f"{shape.name}: making {shape.parameters / 1e9:.2f}e9 random weights")
    target, head = random_model(shape, device, dtype)
    records: list[dict[str, Any]] = []
    left: list[str] = []
    timer = Timer(device)
    for batch in grid.batches:
        for context in grid.contexts:
            where = f"{shape.name}, batch {batch}, context {context}"
            if time.monotonic() > deadline:
                left.append(f"{where} left out: the time was over.")
                continue
            if not _fits(bytes_needed(shape, batch, context, most, itemsize), device):
                left.append(f"{where} left out: its KV cache does not fit.")
                continue
            say(where)
            try:
                records += _cell(prepared(target, head, batch, context, most), grid, timer)
            except torch.OutOfMemoryError:
                left.append(f"{where} left out: the device's memory was not enough.")
            _forget(device)
    if timer.graph_error:
        left.append(f"{shape.name}: CUDA graphs given up: {timer.graph_error}")
    del target, head
    _forget(device)
    return records, left


def _cell(bench: Bench, grid: Grid, timer: Timer) -> list[dict[str, Any]]:
    where = {"shape": bench.shape.name, "batch": bench.batch, "context": bench.context}
    return [
        {**where, "step": step, "tokens": tokens, **timer.both(run)}
        for step, tokens, run in _steps(bench, grid)
    ]


def _steps(bench: Bench, grid: Grid) -> Iterator[tuple[str, int, Step]]:
    for tokens in grid.tokens:
        yield "verify", tokens, bench.verify(tokens)
    yield "verify-tree", 1 + TREE_TOKENS, bench.verify_tree()
    for k in grid.draft_k:
        yield "draft", k, bench.draft(k)
    yield "draft-tree", TREE_TOKENS, bench.draft_tree()


def _fits(size: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return size + SPARE_BYTES < torch.cuda.mem_get_info(device)[0]


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Timer:
    """Times a step as it is and as a CUDA graph; ``graph_error`` says why graphs were given up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph_error = ""

    @torch.inference_mode()
    def both(self, step: Step) -> dict[str, Any]:
        """Median milliseconds of ``step`` run eagerly and replayed, and the faster of the two.

        On a GPU these are times between events on the device: eagerly the launches are in it where
        the device has to wait for them; copying a result to the host is not.
        """
        step()
        eager = self._median(step)
        replay = self._captured(step)
        graph = None if replay is None else self._median(replay)
        is_graph = graph is not None and graph < eager
        return {
            "eager_ms": eager,
            "graph_ms": graph,
            "ms": graph if is_graph else eager,
            "mode": "graph" if is_graph else "eager",
        }

    def _median(self, run: Callable[[], object]) -> float:
        first = self._times(run, 1)[0]
        count = int(min(MOST, max(FEWEST, MEASURE_SECONDS * 1e3 / max(first, 1e-6))))
        return statistics.median(self._times(run, count))

    def _times(self, run: Callable[[], object], count: int) -> list[float]:
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(count):
                run()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize(self.device)
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def _captured(self, step: Step) -> Callable[[], object] | None:
        if self.device.type != "cuda" or self.graph_error:
            return None
        try:
            aside = torch.cuda.Stream(self.device)
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):
                step()  # capture must not meet the first use of anything
            torch.cuda.current_stream(self.device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.graph_error = str(error).splitlines()[0]
            return None
        replay: Callable[[], object] = graph.replay
        return replay


def slopes(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cost of one more verified token in units of a pass over one token, and of a draft.

    ``per_token`` is the least-squares slope of ``ms / ms(1 token)`` over the tokens beyond the
    first; ``draft_4`` and ``tree`` are passes' worth of drafting four tokens and the tree, and
    ``verify_tree`` of verifying the tree.
    """
    found = []
    for shape, batch, context in dict.fromkeys(
        (r["shape"], r["batch"], r["context"]) for r in records
    ):
        mine = {
            (r["step"], r["tokens"]): r["ms"]
            for r in records
            if (r["shape"], r["batch"], r["context"]) == (shape, batch, context)
        }
        one = mine.get(("verify", 1))
        if not one:
            continue
        points = [(t - 1, ms / one - 1) for (step, t), ms in mine.items() if step == "verify"]
        squares = sum(x * x for x, _ in points)
        tree = mine.get(("verify-tree", 1 + TREE_TOKENS))
        drafted, grown = mine.get(("draft", 4)), mine.get(("draft-tree", TREE_TOKENS))
        found.append(
            {
                "shape": shape,
                "batch": batch,
                "context": context,
                "ms_1": one,
                "per_token": sum(x * y for x, y in points) / squares if squares else None,
                "verify_tree": tree / one if tree else None,
                "draft_4": drafted / one if drafted else None,
                "draft_tree": grown / one if grown else None,
            }
        )
    return found
