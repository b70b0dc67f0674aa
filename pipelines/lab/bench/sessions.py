"""Text-forced decoding for ``hvd bench gpu``: recorded sessions, and a method that decodes them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import SettingsError
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.payoff.token_classes import token_classes_of
from decoder.core.router import Decision, DraftRouter, RequestOptions
from decoder.drafting.suffix import SuffixCache
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from decoder.settings import WorkerSettings
from decoder.telemetry.ring import Ring
from pipelines.embedded import load_tokenizer
from pipelines.lab.bench.llama import MAX_DRAFT_TOKENS, MAX_STEP_TOKENS, Engine
from pipelines.lab.replay.traces import files_of, read
from pipelines.replay.cache_drafts import common_prefix
from pipelines.replay.engine import drawn_acceptance
from pipelines.replay.rivals import method

SESSIONS, TURNS = 48, 3  # sessions of a set, requests of a session
PROMPT, ANSWER = 3000, 256  # tokens
Report = dict[str, Any]
ARRAYS: Final = ("tokens", "offsets", "names", "classes")


class Request(NamedTuple):
    """A recorded request: its prompt, int32 [n], and its answer."""

    prompt: NDArray[np.int32]
    answer: list[int]
    session: str
    workload: str
    number: int


def read_sessions(
    path: Path, max_prompt: int, skip: Sequence[str]
) -> tuple[list[list[Request]], Any]:
    """Read recorded sessions, alternating between their sets.

    Args:
        max_prompt: prompts keep this many of their last tokens.
        skip: names of sets to leave out.

    Returns:
        the requests of each session, and the vocabulary's token classes.

    Raises:
        SettingsError: the file cannot be read or has no sessions.
    """
    try:
        with np.load(path) as file:
            tokens, offsets, names, classes = (file[name] for name in ARRAYS)
    except (OSError, KeyError, ValueError) as error:
        raise SettingsError(f"no sessions in {path} ({error}): try --make-sessions.") from error
    sets: dict[str, dict[str, list[Request]]] = {}
    for number, (name, (begin, middle, end)) in enumerate(zip(names, offsets, strict=True)):
        workload, session = str(name).split("\t")
        if workload not in skip:
            prompt = np.ascontiguousarray(tokens[max(begin, middle - max_prompt) : middle])
            request = Request(prompt, tokens[middle:end].tolist(), session, workload, number)
            sets.setdefault(workload, {}).setdefault(session, []).append(request)
    if not sets:
        raise SettingsError(f"no sessions in {path}.")
    rounds = itertools.zip_longest(*(sessions.values() for sessions in sets.values()))
    return [session for each in rounds for session in each if session], classes


def make_sessions(folder: Path, path: Path, log: Callable[[str], None]) -> None:
    """Tokenise trace files into the file that :func:`read_sessions` reads: consecutive requests
    from the middle of some sessions of each set."""
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
        log(f"{file.stem}: {len(sessions)} sessions, {len(names)} requests in all")
    ends = np.cumsum([0, *map(len, parts)])
    offsets = np.stack((ends[:-1:2], ends[1::2], ends[2::2]), axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, tokens=np.concatenate(parts).astype(np.int32), names=names,
                        offsets=offsets, classes=token_classes_of(tokenizer))  # fmt: skip
    log(f"{path}: {len(names)} requests, {path.stat().st_size / 2**20:.1f} MiB")


class Slot:
    """A place of the batch: it decodes one recorded request after the other."""

    def __init__(self, place: int, requests: Sequence[Request]) -> None:
        self._place, self._requests, self._next = place, requests, 0
        self.begin()

    def begin(self) -> None:
        """Start the next request; its prefill has produced the first token."""
        self.request = self._requests[self._next % len(self._requests)]
        self.acceptance = list[int]()  # of a model draft, by position; drawn when first needed
        self.name, self.text = f"{self._place}-{self._next}", self.request.answer[:1]
        self._next += 1

    def model_draft(self, length: int, mean: float, k: int) -> list[int]:
        """A model draft of ``length`` tokens, right up to its drawn acceptance and wrong after."""
        done, answer = len(self.text), self.request.answer
        if not self.acceptance:
            rng = np.random.default_rng([self.request.number, round(100 * mean)])
            self.acceptance = drawn_acceptance(mean, k, len(answer), rng).tolist()
        accepted = answer[done : done + min(self.acceptance[done], length)]
        return accepted + [-1] * (length - len(accepted))

    def commit(self, draft: Sequence[int]) -> list[int]:
        """Append the accepted part of ``draft`` and the next token; returns both."""
        answer, done = self.request.answer, len(self.text)
        accepted = common_prefix(draft, answer[done : done + len(draft)])
        committed = answer[done : done + accepted + 1]
        self.text += committed
        return committed


class Cell(NamedTuple):
    """One shape and batch size: an engine, the requests of each slot, and the measured costs."""

    engine: Engine
    requests: Sequence[Sequence[Request]]
    classes: Any
    costs: CostTable


class Player:
    """Decodes a cell's requests by one method, with its own slots, router and suffix cache.

    ``mean`` is the mean accepted length of model drafts; 0 for methods without a drafter.
    """

    def __init__(self, name: str, mean: float, cell: Cell) -> None:
        self.name, self.mean, self.engine = name, mean, cell.engine
        k, learned = cell.engine.k, name == "hybrid"
        self._fixed = Decision("model", (), k) if name == "eagle3" else Decision("none")
        self.router = None
        if name not in ("none", "eagle3"):
            settings = WorkerSettings.load()
            by = method(name, policy=first_policy(ANY_SCOPE) if learned else None)
            self.router = DraftRouter(
                SuffixCache(by.drafting(settings)), by.policy, cell.classes,
                Sink(Ring(settings.queue_size)), model_len=k * by.model, longest=MAX_DRAFT_TOKENS,
                guarded=learned,
            )  # fmt: skip
            self.router.costs = LiveCosts(cell.costs, live=learned)
        self.slots = [Slot(place, requests) for place, requests in enumerate(cell.requests)]
        self.reset()
        self._start(self.slots)

    def reset(self) -> None:
        """Reset all counters."""
        self.tokens = self.steps = self.cycles = 0
        self.exposed_s = self.router_s = self.gpu_ms = 0.0
        self.rounds, self.arms = list[tuple[int, float]](), Counter[str]()

    def _start(self, slots: Sequence[Slot]) -> None:
        if self.router is None or not slots:
            return
        for slot in slots:
            r = slot.request
            options = RequestOptions(1024, 1 << 20, session=r.session, workload=r.workload)
            self.router.start(slot.name, r.prompt, options)
        names, texts = [slot.name for slot in slots], [slot.text for slot in slots]
        self.router.observe(self.router.report(names, texts))

    def step(self) -> None:
        """Run one step of all slots."""
        e, router, clock = self.engine, self.router, time.perf_counter
        capture_s, names = e.capture_s, [slot.name for slot in self.slots]
        began, decisions = clock(), list[Decision]([self._fixed] * e.batch)
        if router is not None:
            report = router.report(names)
            report.budget = MAX_STEP_TOKENS - e.batch
            decisions = [*router.choose(report)]
        exposed = clock() - began if router is not None else 0.0
        drafts, k = self._draft(decisions)
        counts = np.array([1 + len(draft) for draft in drafts])
        self._launch(drafts, counts, k)
        if router is not None:
            began = clock()
            router.drafted(report, (counts - 1).tolist(), k)
            drafted = clock()
            router.flush(exposed=not e.cuda)
            settling, busy = clock() - drafted, e.busy()  # hidden while the device works
            exposed += drafted - began + settling * (not busy)
            self.router_s += settling * busy
        gpu_ms, is_usual = e.wait(), e.capture_s == capture_s
        e.host_out[: counts.sum()].tolist()  # a server would read them
        committed = [slot.commit(draft) for slot, draft in zip(self.slots, drafts, strict=True)]
        began = clock()
        if router is not None:
            report = router.report(names, committed, (counts - 1).tolist(), 0, int(counts.sum()))
            report.timed = is_usual
            router.observe(report)
        self._replace_finished()
        exposed += (clock() - began) * (router is not None)
        self.steps, self.cycles = self.steps + 1, self.cycles + len(self.slots)
        self.tokens += sum(map(len, committed))
        self.exposed_s, self.router_s = self.exposed_s + exposed, self.router_s + exposed
        self.gpu_ms += gpu_ms if is_usual else self.gpu_ms / max(self.steps - 1, 1)

    def _draft(self, decisions: Sequence[Decision]) -> tuple[list[list[int]], int]:
        """The draft of each slot, and the length of the longest model draft; counts the arms."""
        drafts, k = [], 0
        for slot, d in zip(self.slots, decisions, strict=True):
            is_model = d.arm == "model"
            draft = slot.model_draft(d.room, self.mean, self.engine.k) if is_model else [*d.tokens]
            k = max(k, len(draft) * is_model)
            self.arms[d.arm if draft else "none"] += 1
            drafts.append(draft)
        return drafts, k

    def _launch(self, drafts: Sequence[list[int]], counts: NDArray[np.int64], k: int) -> None:
        """Start drafting ``k`` tokens and verifying ``drafts`` on the device."""
        e = self.engine
        lengths = np.array([len(slot.request.prompt) + len(slot.text) for slot in self.slots])
        if k:
            e.put_lengths(lengths)
            e.begin()
            e.run(("draft", k))
        ids = [t for s, draft in zip(self.slots, drafts, strict=True) for t in (s.text[-1], *draft)]
        key = e.put(counts, lengths - 1, ids)
        if not k:
            e.begin()
        e.run(key)
        e.fetch(len(ids))

    def _replace_finished(self) -> None:
        finished = [s for s in self.slots if len(s.text) >= len(s.request.answer)]
        for slot in finished:
            if slot.text != slot.request.answer:
                raise RuntimeError(f"{self.name} wrote another text than was recorded.")
            if self.router is not None:
                self.router.stop(slot.name, "stop")
            slot.begin()
        self._start(finished)

    def play(self, tokens: int, until: float) -> bool:
        """Play a round: decode until ``self.tokens`` reaches ``tokens``. Returns False if the time
        was over before."""
        before, began, capture_s = self.tokens, time.perf_counter(), self.engine.capture_s
        while self.tokens < tokens and time.monotonic() < until:
            self.step()
        seconds = time.perf_counter() - began - (self.engine.capture_s - capture_s)
        self.rounds.append((self.tokens - before, seconds))
        return self.tokens >= tokens

    def report(self) -> Report:
        """The method's figures over all rounds."""
        (tokens, seconds), n = map(sum, zip(*self.rounds, strict=True)), self.cycles
        guards = self.router.controller if self.router else None
        return {
            "method": self.name, "model_accepts": self.mean or None, "tok_per_s": tokens / seconds,
            "tok_per_s_decision_free": tokens / max(seconds - self.exposed_s, 1e-9),
            "gpu_ms": self.gpu_ms / self.steps, "step_ms": 1e3 * seconds / self.steps,
            "router_us": 1e6 * self.router_s / n, "router_exposed_us": 1e6 * self.exposed_s / n,
            "tokens_a_cycle": self.tokens / n,
            "arms": {arm: count / n for arm, count in sorted(self.arms.items())},
            "tokens": tokens, "seconds": seconds, "steps": self.steps, "rounds": self.rounds,
            "floor": guards.floor.serving if guards and self.name == "hybrid" else None,
        }  # fmt: skip
