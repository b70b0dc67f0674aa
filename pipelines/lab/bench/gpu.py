"""'hvd bench gpu': what steps cost on an accelerator, and methods there, by the wall clock.

The target ('llama') is *text-forced*: a step runs as served (drafter, verification, argmax, in
CUDA graphs), and commits a recorded session's tokens. The router is the worker's own. Needs torch,
numpy, numba, pydantic and msgspec; 'python -m pipelines.lab.bench.gpu' starts it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import HvdError, SettingsError
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.payoff.token_classes import token_classes_of
from decoder.core.router import Decision, DraftRouter, RequestOptions
from decoder.drafting.suffix import SuffixCache
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from decoder.settings import WorkerSettings
from decoder.telemetry.ring import Ring
from pipelines import machine
from pipelines.embedded import load_tokenizer
from pipelines.lab.bench.llama import LONGEST, MOST, SHAPES, SIZES, Engine, Model
from pipelines.lab.bench.methods import numbers, words
from pipelines.lab.replay.costs import cost_table
from pipelines.lab.replay.traces import files_of, read
from pipelines.replay.cache_drafts import common_prefix
from pipelines.replay.engine import drawn_acceptance
from pipelines.replay.rivals import method
from pipelines.reports import write_json
from pipelines.stats import columns, interval

NOTES: Final = (
    "Random weights, bfloat16; KV caches hold random numbers; no prompt is read (decode only).",
    "Tokens committed are the recorded text's. A model draft's accepted length is drawn by request "
    "and position, the same for every method; its mean is the paper's for trees, at less cost.",
    "70B/TP8 is one rank's eighth of target and head (fc whole); no all-reduce is timed.",
    "The drafter runs for the whole batch, and reads a fixed number of new tokens each time.",
    "Wall clock with all Python in it, without capturing graphs. none and eagle3 have no router.",
    "Steps run no more than MOST tokens; above it the last drafts are cut.",
)
PER_REQUEST: Final = (1, 2, 3, 5, 9, 17, 33)
WARM: Final = 12  # tokens of each request, before what is counted
SESSIONS, TURNS, PROMPT, ANSWER = 48, 3, 3000, 256  # of a set, of a session, tokens of a request
READ: Final = itemgetter("tokens", "offsets", "names", "classes")
METHODS: Final = ("none", "suffix", "eagle3", "frequency", "hybrid")
Report = dict[str, Any]


class Request(NamedTuple):
    """A recorded one: prompt int32 [n], and the answer that its target gives."""

    prompt: NDArray[np.int32]
    answer: list[int]
    session: str
    workload: str
    number: int


def read_sessions(path: Path, longest: int, skip: Sequence[str]) -> tuple[list[list[Request]], Any]:
    """Sessions, each a list of requests whose prompts are cut to their last ``longest`` tokens,
    without the sets in ``skip``, set by set in turn; and the token classes of their vocabulary.

    Raises:
        SettingsError: there are none.
    """
    try:
        with np.load(path) as held:
            tokens, offsets, names, classes = READ(held)
    except (OSError, KeyError, ValueError) as error:
        raise SettingsError(f"no sessions in {path} ({error}): try --make-sessions.") from error
    sets: dict[str, dict[str, list[Request]]] = {}
    for number, (name, (low, middle, high)) in enumerate(zip(names, offsets, strict=True)):
        workload, session = str(name).split("\t")
        if workload not in skip:
            prompt = np.ascontiguousarray(tokens[max(low, middle - longest) : middle])
            request = Request(prompt, tokens[middle:high].tolist(), session, workload, number)
            sets.setdefault(workload, {}).setdefault(session, []).append(request)
    if not sets:
        raise SettingsError(f"no sessions in {path}.")
    turns = itertools.zip_longest(*(sessions.values() for sessions in sets.values()))
    return [session for turn in turns for session in turn if session], classes


class Slot:
    """A client at work: one recorded request after the other, of one session after the other."""

    def __init__(self, place: int, lane: Sequence[Request]) -> None:
        self._place, self._lane, self._next = place, lane, 0
        self.begin()

    def begin(self) -> None:
        """Its next request, whose first token came with the prompt."""
        self.request, self.luck = self._lane[self._next % len(self._lane)], list[int]()
        self.name, self.text = f"{self._place}-{self._next}", self.request.answer[:1]
        self._next += 1

    def modelled(self, room: int, mean: float, k: int) -> list[int]:
        """A model draft of ``room`` tokens: right as far as it is lucky, then wrong."""
        done, answer = len(self.text), self.request.answer
        if not self.luck:
            rng = np.random.default_rng([self.request.number, round(100 * mean)])
            self.luck = drawn_acceptance(mean, k, len(answer), rng).tolist()
        right = answer[done : done + min(self.luck[done], room)]
        return right + [-1] * (room - len(right))

    def commit(self, draft: Sequence[int]) -> list[int]:
        """What the target makes of ``draft``. Mutates."""
        answer, done = self.request.answer, len(self.text)
        accepted = common_prefix(draft, answer[done : done + len(draft)])
        self.text += (made := answer[done : done + accepted + 1])
        return made


class Player:
    """One method in one cell, with slots, router and cache of its own, over a shared engine."""

    def __init__(
        self, name: str, mean: float, e: Engine, lanes: Sequence[Sequence[Request]], classes: Any,
        costs: CostTable,
    ) -> None:  # fmt: skip
        self.name, self.mean, self.engine = name, mean, e
        self._fixed = [Decision("model", (), e.k) if name == "eagle3" else Decision("none")]
        self.router = None
        if name not in ("none", "eagle3"):  # a worker's, with its defaults
            settings, learned = WorkerSettings.load(), name == "hybrid"
            by = method(name, policy=first_policy(ANY_SCOPE) if learned else None)
            self.router = DraftRouter(
                SuffixCache(by.drafting(settings)), by.policy, classes,
                Sink(Ring(settings.queue_size)), model_len=e.k * by.model, longest=LONGEST,
                guarded=learned,
            )  # fmt: skip
            self.router.costs = LiveCosts(costs, live=learned)
        self.slots = [Slot(place, lane) for place, lane in enumerate(lanes)]
        self.forget()
        self._enter(self.slots)

    def forget(self) -> None:
        """Counts begin anew."""
        self.tokens = self.steps = self.cycles = 0
        self.exposed_s = self.own_s = self.gpu_ms = 0.0
        self.rounds, self.arms = list[tuple[int, float]](), Counter[str]()

    def _enter(self, slots: Sequence[Slot]) -> None:
        if self.router is None or not slots:
            return
        for name, r in ((slot.name, slot.request) for slot in slots):
            options = RequestOptions(1024, 1 << 20, session=r.session, workload=r.workload)
            self.router.start(name, r.prompt, options)
        names = [slot.name for slot in slots]
        self.router.observe(self.router.report(names, [slot.text for slot in slots]))

    def step(self) -> None:
        """Choose, draft, verify, accept, observe."""
        e, router, slots = self.engine, self.router, self.slots
        clock, captured, names = time.perf_counter, e.capture_s, [slot.name for slot in self.slots]
        began, fixed = clock(), self._fixed * e.batch
        decisions: Any = fixed
        if router is not None:
            asked = router.report(names)
            asked.budget = MOST - e.batch
            decisions = router.choose(asked)
        exposed = clock() - began if router is not None else 0.0
        drafts = [
            slot.modelled(d.room, self.mean, e.k) if d.arm == "model" else list(d.tokens)
            for slot, d in zip(slots, decisions, strict=True)
        ]
        arms = [d.arm if draft else "none" for d, draft in zip(decisions, drafts, strict=True)]
        k = max((len(d) for a, d in zip(arms, drafts, strict=True) if a == "model"), default=0)
        counts = np.array([1 + len(draft) for draft in drafts])
        lengths = np.array([len(slot.request.prompt) + len(slot.text) for slot in slots])
        if k:
            e.put_lengths(lengths)
            e.begin()
            e.run(("draft", k))
        ids = [t for s, draft in zip(slots, drafts, strict=True) for t in (s.text[-1], *draft)]
        key = e.put(counts, lengths - 1, ids)
        if not k:
            e.begin()
        e.run(key)
        e.fetch(len(ids))
        if router is not None:
            began = clock()
            router.drafted(asked, (counts - 1).tolist(), k)
            exposed += (told := clock()) - began
            router.flush(exposed=not e.cuda)
            took = clock() - told
            exposed, self.own_s = exposed + took * (not e.busy()), self.own_s + took * e.busy()
        gpu_ms = e.wait()
        e.host_out[: len(ids)].tolist()  # a server would read them
        made = [slot.commit(draft) for slot, draft in zip(slots, drafts, strict=True)]
        began = clock()
        if router is not None:
            report = router.report(names, made, (counts - 1).tolist(), 0, len(ids))
            report.timed = e.capture_s == captured
            router.observe(report)
        self._go_on()
        exposed += (clock() - began) * (router is not None)
        self.steps, self.cycles = self.steps + 1, self.cycles + len(slots)
        self.tokens += sum(map(len, made))
        self.exposed_s, self.own_s = self.exposed_s + exposed, self.own_s + exposed
        self.gpu_ms += gpu_ms if e.capture_s == captured else self.gpu_ms / max(self.steps - 1, 1)
        self.arms.update(arms)

    def _go_on(self) -> None:
        """Let other requests follow those that ended."""
        ended = [slot for slot in self.slots if len(slot.text) >= len(slot.request.answer)]
        for slot in ended:
            if slot.text != slot.request.answer:
                raise RuntimeError(f"{self.name} wrote another text than was recorded.")
            if self.router is not None:
                self.router.stop(slot.name, "stop")
            slot.begin()
        self._enter(ended)

    def play(self, tokens: int, until: float) -> bool:
        """Decode until there are so many since counts began; False where the time was over."""
        before, began, captured = self.tokens, time.perf_counter(), self.engine.capture_s
        while self.tokens < tokens and time.monotonic() < until:
            self.step()
        seconds = time.perf_counter() - began - (self.engine.capture_s - captured)
        self.rounds.append((self.tokens - before, seconds))
        return self.tokens >= tokens

    def told(self) -> Report:
        """What came of it; seconds and rates are of whole rounds."""
        (tokens, seconds), n = map(sum, zip(*self.rounds, strict=True)), self.cycles
        guards = self.router.controller if self.router else None
        return {
            "method": self.name, "model_accepts": self.mean or None, "tok_per_s": tokens / seconds,
            "tok_per_s_decision_free": tokens / max(seconds - self.exposed_s, 1e-9),
            "gpu_ms": self.gpu_ms / self.steps, "step_ms": 1e3 * seconds / self.steps,
            "router_us": 1e6 * self.own_s / n, "router_exposed_us": 1e6 * self.exposed_s / n,
            "tokens_a_cycle": self.tokens / n,
            "arms": {arm: count / n for arm, count in sorted(self.arms.items())},
            "tokens": tokens, "seconds": seconds, "steps": self.steps, "rounds": self.rounds,
            "floor": guards.floor.serving if guards and self.name == "hybrid" else None,
        }  # fmt: skip


def costs_of(e: Engine, until: float) -> list[Report]:
    """Milliseconds of verifying, by tokens a request and context, and of drafting."""
    found, most = list[Report](), e.capacity - 1 - LONGEST
    for context in sorted({min(1024, most), min(3072, most)}):
        e.put_lengths([context] * e.batch)
        steps = [("verify", n) for n in PER_REQUEST if n * e.batch <= MOST]
        for step, n in [*steps, *(("draft", k) for k in range(e.k + 1))]:
            if time.monotonic() >= until and context > 1024:
                return found
            key = e.uniform(n * e.batch, context) if step == "verify" else (step, n)
            ms = e.timed(key, 15 if e.cuda else 2)
            found.append({"shape": e.s.name, "batch": e.batch, "context": context, "step": step,
                          "tokens": n, "ms": ms})  # fmt: skip
    return found


def compare(players: Sequence[Player]) -> list[Report]:
    """What each came to, with ratios over ``none`` and, of the hybrid, over the best other one that
    has the same drafter; intervals are over rounds."""
    found = [(p, p.told() | {"over": {}}) for p in players]
    for p, mine in found:
        others = [each for each in found if each[0].mean in (0.0, p.mean) and each[0] is not p]
        picked = [each for each in others if each[0].name == "none"]
        if p.name == "hybrid" and others:
            picked.append(max(others, key=lambda each: each[1]["tok_per_s"]))
        for q, theirs in picked:
            ratio = mine["tok_per_s"] / theirs["tok_per_s"]
            sure = interval(columns(p.rounds), columns(q.rounds)) or (None, None)
            mine["over"][q.name] = [ratio, *sure]
    return [mine for _, mine in found]


def fault(where: str, error: Exception) -> str:
    """What is written of an error that ends only a part."""
    traceback.print_exc()
    return f"{where}: {type(error).__name__}: {str(error)[:500]}"


def cell(
    o: argparse.Namespace, e: Engine, sessions: Sequence[Sequence[Request]], classes: Any,
    until: float, told: Callable[[Report], None],
) -> None:  # fmt: skip
    """One shape and batch, until about ``until``; ``told`` is given the record as it grows."""
    began = time.monotonic()
    record: Report = {"shape": e.s.name, "batch": e.batch, "capacity": e.capacity}
    gc.collect()
    gc.freeze()  # as a server does after its start; and each capture collects what is not frozen
    record |= {"costs": costs_of(e, began + 0.3 * (until - began)), "methods": [], "errors": []}
    told(record)
    costs = cost_table(record["costs"], graphs=SIZES)
    every = [r for s in sessions for r in s]
    lanes = [[r for s in sessions[i :: e.batch] for r in s] or every for i in range(e.batch)]
    players = [
        Player(name, mean, e, lanes, classes, costs)
        for name in o.methods
        for mean in ((0.0,) if name in ("none", "suffix") else o.accepts)
    ]
    gc.freeze()

    def tried(p: Player, tokens: int, until: float) -> bool:
        try:
            return p.play(tokens, until)
        except Exception as error:  # noqa: BLE001 - one method's fault is no other's
            players.remove(p)
            record["errors"].append(fault(p.name, error))
            return True

    for p in 2 * players:  # by the second time most graphs are there
        if p in players:
            p.forget()
            tried(p, WARM * e.batch, until)
    paces = [p.rounds[-1][1] / max(p.rounds[-1][0], 1) for p in players]
    share = (until - time.monotonic()) / o.rounds / max(sum(paces), 1e-9)
    quota = max(min(int(share), o.tokens), e.batch)
    for p in players:
        p.forget()
    took, turn = 0.0, 0
    while players and turn < 2 * o.rounds and (not took or time.monotonic() + 0.9 * took < until):
        start, first = time.monotonic(), turn % len(players)
        turn += 1
        order = [*players[first:], *players[:first]]
        whole = [tried(p, quota * turn, o.deadline) for p in order]
        took = time.monotonic() - start
        if not all(whole):
            record["errors"].append("the time was over within a round")
            break
    record["methods"] = compare([p for p in players if p.tokens])
    record |= {"rounds": turn, "graphs": len(e.graphs), "capture_s": e.capture_s}
    record["seconds"] = time.monotonic() - began
    told(record)


def run(o: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure; the report is written after each part of it."""
    began, device, said = time.monotonic(), torch.device(o.device), machine.description()
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        said = f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    versions = machine.versions("torch", "numpy", "numba", "triton")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sessions, classes = read_sessions(o.sessions, o.context, o.skip)
    requests = [r for s in sessions for r in s]
    capacity = -(-max(len(r.prompt) + len(r.answer) for r in requests) // 128) * 128 + 128
    report: Report = {
        "benchmark": "gpu", "device": said, "versions": versions, "notes": NOTES,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "dtype": str(dtype),
        "minutes": o.minutes, "compiled_s": time.process_time(),  # imports, the router's loops
        "sessions": len(sessions), "requests": len(requests), "capacity": capacity, "k": o.k,
        "sets": Counter(r.workload for r in requests), "shapes": {}, "cells": [], "errors": [],
    }  # fmt: skip
    o.deadline = began + 60 * o.minutes
    pairs = (o.batches[i : i + 2] for i in range(0, len(o.batches), 2))
    plan = [(s, b) for some in pairs for s in o.shapes for b in some]
    weights, model, held = [2.0 if b == 1 else 1.0 for _, b in plan], None, ""

    def told(record: Report) -> None:
        if record not in report["cells"]:
            report["cells"].append(record)
        write_json(report, o.json)
        say("\n".join(table(record)))

    for place, (name, batch) in enumerate(plan):
        s, now = SHAPES[name], time.monotonic()
        until = now + (o.deadline - now) * weights[place] / sum(weights[place:])
        say(f"{name}, batch {batch}: {until - now:.0f} s")
        try:
            if held != name or model is None:
                model = None  # before there is another
                model, held = Model.random(s, device, dtype), name
                attention = "kernel" if device.type == "cuda" else "torch's, masked: a CPU"
                report["shapes"][name] = asdict(s) | {"attention": attention}
            cell(o, Engine(s, model, batch, capacity, o.k), sessions, classes, until, told)
        except Exception as error:  # noqa: BLE001 - told, and the rest goes on
            report["errors"].append(fault(f"{name}, batch {batch}", error))
        gc.unfreeze()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report["seconds"] = time.monotonic() - began
    write_json(report, o.json)
    say("\n".join([f"{report['device']}, {report['date']}", *NOTES, *report["errors"]]))


def table(record: Report) -> list[str]:
    """What methods made of a cell, in lines; what steps cost is in the JSON."""
    lines = [f"== {record['shape']}, batch {record['batch']}: {len(record['costs'])} steps timed"]
    if record["methods"]:
        lines.append(f"{'method':<10}accepts   tok/s    free  ms/step  gpu ms  us/req exposed  "
                     "tok/cycle  cache model  over none, best")  # fmt: skip
    for m in record["methods"]:
        over = "  ".join(
            f"{name} {ratio:.3f}" + (f" ({low:.3f}-{high:.3f})" if low else "")
            for name, (ratio, low, high) in m["over"].items()
        )
        lines.append(
            f"{m['method']:<10}{m['model_accepts'] or 0:7.2f}{m['tok_per_s']:8.0f}"
            f"{m['tok_per_s_decision_free']:8.0f}{m['step_ms']:9.2f}{m['gpu_ms']:8.2f}"
            f"{m['router_us']:8.1f}{m['router_exposed_us']:8.1f}{m['tokens_a_cycle']:11.2f}"
            f"{m['arms'].get('cache', 0):7.2f}{m['arms'].get('model', 0):6.2f}  {over}"
        )
    return [*lines, *record["errors"]]


def make_sessions(folder: Path, path: Path, say: Callable[[str], None]) -> None:
    """Tokenise trace files of ``folder`` into what :func:`read_sessions` takes: of each set some
    sessions, of each session consecutive requests from its middle."""
    tokenizer, names, parts = load_tokenizer(None), list[str](), list[Any]()
    for file in files_of([folder]):
        sessions: dict[str, list[Any]] = {}
        for trace in read(file, tokenizer).traces:
            if len(trace.prompt) >= 8 and len(trace.output) >= 16:
                sessions.setdefault(trace.session, []).append(trace)
        for session, traces in list(sessions.items())[:SESSIONS]:
            middle = max((len(traces) - TURNS) // 2, 0)
            for t in traces[middle : middle + TURNS]:
                parts += [np.asarray(t.prompt[-PROMPT:]), np.asarray(t.output[:ANSWER])]
                names.append(f"{file.stem}\t{session}")
        say(f"{file.stem}: {len(sessions)} sessions, {len(names)} requests in all")
    ends = np.cumsum([0, *map(len, parts)])
    offsets = np.stack((ends[:-1:2], ends[1::2], ends[2::2]), axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, tokens=np.concatenate(parts).astype(np.int32), names=names,
                        offsets=offsets, classes=token_classes_of(tokenizer))  # fmt: skip
    say(f"{path}: {len(names)} requests, {path.stat().st_size / 2**20:.1f} MiB")


OPTIONS: Final[dict[str, tuple[Any, str]]] = {
    "sessions": (Path("sessions.npz"), "what is decoded"),
    "json": (Path("reports/bench/gpu.json"), "where the report goes"),
    "device": ("cuda", "a torch device"),
    "shapes": ("Llama-3.1-8B,Llama-3.1-70B/TP8", "of the target"),
    "batches": ("1,64,8,32", "two at a time for each shape"),
    "methods": (",".join(METHODS), "to compare"),
    "accepts": ("3.16,2.23", "means of model drafts"),
    "k": (5, "tokens of a model draft at most"),
    "minutes": (6.0, "for all of it"),
    "rounds": (12, "of each cell, about"),
    "tokens": (1 << 30, "of a round at most"),
    "context": (PROMPT, "last tokens of a prompt"),
    "skip": ("alpacaeval_chat,mtbench_vicuna", "sets of the sessions left out"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; exit status 2 after one sentence."""

    def say(text: str) -> None:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stdout.flush()

    parser = argparse.ArgumentParser(prog="hvd bench gpu", description=__doc__)
    for name, (default, said) in OPTIONS.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=said)
    parser.add_argument("--make-sessions", type=Path, help="only make these, of a folder's traces")
    o = parser.parse_args(arguments)
    try:
        if o.make_sessions:
            make_sessions(o.make_sessions, o.sessions, say)
            return 0
        o.shapes, o.methods, o.skip = words(o.shapes), words(o.methods), words(o.skip)
        if unknown := [*{*o.shapes} - {*SHAPES}, *{*o.methods} - {*METHODS}]:
            raise SettingsError(f"no {unknown[0]!r}: there are {', '.join((*SHAPES, *METHODS))}.")
        o.batches, o.accepts = numbers(o.batches, "--batches"), tuple(map(float, words(o.accepts)))
        with torch.inference_mode():
            run(o, say)
    except HvdError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
