"""'hvd bench gpu': step times on an accelerator, and decoding methods compared by the wall clock.

The target ('llama') is *text-forced*: each step runs as served (drafter, verification, argmax, in
CUDA graphs) and then commits a recorded session's tokens. The router is the worker's own. Needs
torch, numpy, numba, pydantic and msgspec; run it with 'python -m pipelines.lab.bench.gpu'.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from decoder.contracts.errors import HvdError, SettingsError
from pipelines import machine
from pipelines.lab.bench.llama import (
    MAX_DRAFT_TOKENS,
    MAX_STEP_TOKENS,
    SHAPES,
    STEP_SIZES,
    Engine,
    Model,
)  # fmt: skip
from pipelines.lab.bench.methods import numbers, words
from pipelines.lab.bench.sessions import PROMPT, Cell, Player, Report, make_sessions, read_sessions
from pipelines.lab.replay.costs import cost_table
from pipelines.reports import write_json
from pipelines.stats import columns, interval

NOTES: Final = (
    "Weights and KV caches are random, in bfloat16. No prompt is prefilled (decode only).",
    "The committed tokens are the recorded text. A model draft's accepted length is drawn by "
    "request and position, the same for every method; its mean is the paper's for trees.",
    "70B/TP8 is one rank's eighth of target and head (fc whole), without all-reduce.",
    "The drafter runs for the whole batch and reads a fixed number of new tokens each time.",
    "Times are wall clock and include Python, but not graph capture. none and eagle3 have no "
    "router.",
    f"A step runs at most {MAX_STEP_TOKENS} tokens; drafts beyond that are cut.",
)
REQUEST_TOKENS: Final = (1, 2, 3, 5, 9, 17, 33)
WARM_UP_TOKENS: Final = 12  # of each request
METHODS: Final = ("none", "suffix", "eagle3", "frequency", "hybrid")


def step_costs(e: Engine, until: float) -> list[Report]:
    """Milliseconds of verifying, by tokens of a request and context, and of drafting."""
    costs, longest = list[Report](), e.capacity - 1 - MAX_DRAFT_TOKENS
    for context in sorted({min(1024, longest), min(3072, longest)}):
        e.put_lengths([context] * e.batch)
        steps = [("verify", n) for n in REQUEST_TOKENS if n * e.batch <= MAX_STEP_TOKENS]
        for step, n in [*steps, *(("draft", k) for k in range(e.k + 1))]:
            if time.monotonic() >= until and context > 1024:
                return costs
            key: tuple[Any, ...] = step, n
            if step == "verify":
                counts = np.full(e.batch, n)
                key = e.put(counts, np.full(e.batch, context), [1] * (n * e.batch))
            ms = e.timed(key, 15 if e.cuda else 2)
            costs.append({"shape": e.s.name, "batch": e.batch, "context": context, "step": step,
                          "tokens": n, "ms": ms})  # fmt: skip
    return costs


def compare(players: Sequence[Player]) -> list[Report]:
    """Each player's report, with ratios ``over`` none and, for hybrid, over the best method with
    the same drafter. Intervals are over rounds."""
    reports = [(p, p.report() | {"over": {}}) for p in players]
    for p, mine in reports:
        others = [each for each in reports if each[0].mean in (0.0, p.mean) and each[0] is not p]
        chosen = [each for each in others if each[0].name == "none"]
        if p.name == "hybrid" and others:
            chosen.append(max(others, key=lambda each: each[1]["tok_per_s"]))
        for q, theirs in chosen:
            ratio = mine["tok_per_s"] / theirs["tok_per_s"]
            bounds = interval(columns(p.rounds), columns(q.rounds)) or (None, None)
            mine["over"][q.name] = [ratio, *bounds]
    return [mine for _, mine in reports]


def describe_error(where: str, error: Exception) -> str:
    """One line about an error that ends only a part of the run; the traceback is printed."""
    traceback.print_exc()
    return f"{where}: {type(error).__name__}: {str(error)[:500]}"


class Measurement:
    """A whole run; the report is written after each part."""

    def __init__(self, o: argparse.Namespace, log: Callable[[str], None]) -> None:
        self.o, self.log, self.began = o, log, time.monotonic()
        self.device = torch.device(o.device)
        self.sessions, self.classes = read_sessions(o.sessions, o.context, o.skip)
        requests = [r for session in self.sessions for r in session]
        longest = max(len(r.prompt) + len(r.answer) for r in requests)
        self.capacity = -(-longest // 128) * 128 + 128
        self.deadline = self.began + 60 * o.minutes
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        name = machine.description()
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.device)
            name = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
        self.report: Report = {
            "benchmark": "gpu", "device": name, "notes": NOTES,
            "versions": machine.versions("torch", "numpy", "numba"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "dtype": str(self.dtype),
            "minutes": o.minutes, "compiled_s": time.process_time(),  # imports, router's kernels
            "sessions": len(self.sessions), "requests": len(requests), "capacity": self.capacity,
            "k": o.k, "sets": Counter(r.workload for r in requests), "shapes": {}, "cells": [],
            "errors": [],
        }  # fmt: skip

    def run(self) -> None:
        """Measure every shape and batch size; a failing one is reported and skipped."""
        o, report = self.o, self.report
        pairs = (o.batches[i : i + 2] for i in range(0, len(o.batches), 2))
        plan = [(shape, batch) for pair in pairs for shape in o.shapes for batch in pair]
        weights, model, loaded = [2.0 if batch == 1 else 1.0 for _, batch in plan], None, ""
        for place, (name, batch) in enumerate(plan):
            s, now = SHAPES[name], time.monotonic()
            until = now + (self.deadline - now) * weights[place] / sum(weights[place:])
            self.log(f"{name}, batch {batch}: {until - now:.0f} s")
            try:
                if loaded != name or model is None:
                    model = None  # free it before the next one is made
                    model, loaded = Model.random(s, self.device, self.dtype), name
                    attention = "flash" if self.device.type == "cuda" else "torch's, masked: a CPU"
                    report["shapes"][name] = asdict(s) | {"attention": attention}
                self.measure_cell(Engine(s, model, batch, self.capacity, o.k), until)
            except Exception as error:  # noqa: BLE001 - reported; the other cells are measured
                report["errors"].append(describe_error(f"{name}, batch {batch}", error))
            gc.unfreeze()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        report["seconds"] = time.monotonic() - self.began
        write_json(report, o.json)
        self.log("\n".join([f"{report['device']}, {report['date']}", *NOTES, *report["errors"]]))

    def measure_cell(self, e: Engine, until: float) -> None:
        """Measure step costs, then all methods, until about ``until``."""
        o, began = self.o, time.monotonic()
        record: Report = {"shape": e.s.name, "batch": e.batch, "capacity": e.capacity}
        gc.collect()
        gc.freeze()  # as a server does after its start
        costs = step_costs(e, began + 0.3 * (until - began))
        record |= {"costs": costs, "methods": [], "errors": []}
        self.report["cells"].append(record)
        self._write(record)
        slots = [
            [r for session in self.sessions[i :: e.batch] for r in session]
            or [r for session in self.sessions for r in session]
            for i in range(e.batch)
        ]
        cell = Cell(e, slots, self.classes, cost_table(costs, graphs=STEP_SIZES))
        players = [
            Player(name, mean, cell)
            for name in o.methods
            for mean in ((0.0,) if name in ("none", "suffix") else o.accepts)
        ]
        gc.freeze()
        rounds = self._play_rounds(players, record["errors"], e.batch, until)
        record["methods"] = compare([p for p in players if p.tokens])
        record |= {"rounds": rounds, "graphs": len(e.graphs), "capture_s": e.capture_s}
        record["seconds"] = time.monotonic() - began
        self._write(record)

    def _play_rounds(
        self, players: list[Player], errors: list[str], batch: int, until: float
    ) -> int:
        """Warm up, then play rounds in rotating order; removes players that fail. Returns the
        number of rounds."""
        o = self.o

        def play(p: Player, tokens: int, until: float) -> bool:
            try:
                return p.play(tokens, until)
            except Exception as error:  # noqa: BLE001 - the other methods go on
                players.remove(p)
                errors.append(describe_error(p.name, error))
                return True

        for p in 2 * players:  # after the first time most graphs are captured
            if p in players:
                p.reset()
                play(p, WARM_UP_TOKENS * batch, until)
        paces = [p.rounds[-1][1] / max(p.rounds[-1][0], 1) for p in players]
        share = (until - time.monotonic()) / o.rounds / max(sum(paces), 1e-9)
        quota = max(min(int(share), o.tokens), batch)
        for p in players:
            p.reset()
        took, number = 0.0, 0
        while players and number < 2 * o.rounds:
            start, first = time.monotonic(), number % len(players)
            if took and start + 0.9 * took >= until:
                break
            number += 1
            order = [*players[first:], *players[:first]]
            whole = [play(p, quota * number, self.deadline) for p in order]
            took = time.monotonic() - start
            if not all(whole):
                errors.append("the time was over within a round")
                break
        return number

    def _write(self, record: Report) -> None:
        write_json(self.report, self.o.json)
        lines = [f"== {record['shape']}, batch {record['batch']}: {len(record['costs'])} steps"]
        shown = "tok_per_s", "step_ms", "gpu_ms", "router_exposed_us", "tokens_a_cycle"
        for m in record["methods"]:
            over = (f"{name} {each[0]:.3f}" for name, each in m["over"].items())
            figures = " ".join(f"{key} {m[key]:.2f}" for key in shown)
            named = f"{m['method']:<10} {m['model_accepts'] or 0:.2f}"
            lines.append(f"{named} {figures}  over {', '.join(over)}")
        self.log("\n".join([*lines, *record["errors"]]))


OPTIONS: Final[dict[str, tuple[Any, str]]] = {
    "sessions": (Path("sessions.npz"), "recorded sessions to decode"),
    "json": (Path("reports/bench/gpu.json"), "where to write the report"),
    "device": ("cuda", "a torch device"),
    "shapes": ("Llama-3.1-8B,Llama-3.1-70B/TP8", "shapes of the target"),
    "batches": ("1,64,8,32", "batch sizes; two at a time for each shape"),
    "methods": (",".join(METHODS), "methods to compare"),
    "accepts": ("3.16,2.23", "mean accepted lengths of model drafts"),
    "k": (5, "most tokens of a model draft"),
    "minutes": (6.0, "time for the whole run"),
    "rounds": (12, "rounds of a shape and batch size, about"),
    "tokens": (1 << 30, "most tokens of a round"),
    "context": (PROMPT, "most tokens of a prompt; the last ones are kept"),
    "skip": ("alpacaeval_chat,mtbench_vicuna", "sets of sessions to leave out"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; exit status 2 after an error of the settings."""

    def log(text: str) -> None:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stdout.flush()

    parser = argparse.ArgumentParser(prog="hvd bench gpu", description=__doc__)
    for name, (default, meaning) in OPTIONS.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=meaning)
    parser.add_argument("--make-sessions", type=Path, help="only tokenise the traces of a folder")
    o = parser.parse_args(arguments)
    try:
        if o.make_sessions:
            make_sessions(o.make_sessions, o.sessions, log)
            return 0
        o.shapes, o.methods, o.skip = words(o.shapes), words(o.methods), words(o.skip)
        if unknown := [*{*o.shapes} - {*SHAPES}, *{*o.methods} - {*METHODS}]:
            raise SettingsError(f"no {unknown[0]!r}: choose from {', '.join((*SHAPES, *METHODS))}.")
        o.batches, o.accepts = numbers(o.batches, "--batches"), tuple(map(float, words(o.accepts)))
        with torch.inference_mode():
            Measurement(o, log).run()
    except HvdError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
