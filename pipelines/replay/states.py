"""Every token position of recorded outputs as a decoding state (paper, Appendix B).

Two ways to the same states. :func:`replay` feeds the router that serves, one token a cycle: the
definition, and what a worker would send. :func:`every_token` takes the decoder's own cache,
features and memory and leaves out what only serving needs; the label of a draft is read off the
recording at once, but what is learned from it waits until the position where a worker knows it.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.events import DraftEvent
from decoder.contracts.features import FloatArray
from decoder.drafting.drafts import CacheDraft
from decoder.drafting.suffix import SuffixCache
from decoder.hindsight import Resolved, event_of
from decoder.labels import common_prefix
from decoder.payoff.featurize import DraftState, featurize
from decoder.payoff.memory import History, Keys, TenantMemory, memory_keys
from decoder.router import Committed, DraftRouter, EventSink, RequestOptions
from decoder.settings import WorkerSettings
from learner.rows import Rows, empty, hash_id
from pipelines.replay.dialogue import DialogueCache, Turn, turns
from pipelines.replay.traces import Trace

Progress = Callable[[int], None]
"""Called now and then with the output tokens replayed since the last call."""

UNLIMITED: Final = 1 << 20
"""Context length of a replay: a recorded output has room, or it would not have been recorded."""
BATCH: Final = 512
"""States whose features are computed at once."""
POLICY: Final = frequency_policy("replay")
"""Decides in name only: whether the last drafts were chosen is a feature of the next."""


@dataclass(frozen=True)
class States:
    """Labelled cache drafts, ordered by recording and position."""

    rows: Rows
    trace: NDArray[np.int32]  # [n] index of the recording
    position: NDArray[np.int32]  # [n] output tokens committed before the draft

    def __len__(self) -> int:
        return len(self.rows)


def every_token(
    traces: Sequence[Trace],
    warm_up: Sequence[Trace],
    token_classes: FloatArray,
    settings: WorkerSettings,
    progress: Progress | None = None,
    warmed: Callable[[], None] | None = None,
) -> States:
    """Labelled cache drafts of every position of ``traces`` that had one.

    Outputs of earlier traces are in the suffix cache of later ones, as on a worker.

    Args:
        warm_up: replayed first, so that the cache and the memory hold them; not in the result.
        warmed: called when the warm-up is over.
    """
    cache, tenant = DialogueCache(settings), TenantMemory()
    batches = _Batches(token_classes)
    with _uncollected():
        for turn in turns([*warm_up, *traces], cache):
            index = turn.index - len(warm_up)
            if index == 0 and warmed is not None:
                warmed()
            for state, label in _positions(turn, cache, tenant):
                if index >= 0:
                    batches.add(state, label, index)
            if progress is not None:
                progress(len(turn.output))
    return batches.states([t.session for t in traces])


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: no state refers to itself, and a tenth of the time goes to
    looking through the labels for one that does."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Label:
    position: int
    accepted: int
    length: int
    censored: bool


def _positions(
    turn: Turn, cache: SuffixCache, tenant: TenantMemory
) -> Iterator[tuple[DraftState, _Label]]:
    """Each state of one output with its label. Mutates cache and memory."""
    output, prompt_len, allowed = turn.output, len(turn.prompt), turn.trace.allowed
    history, size = History(), len(turn.output)
    tail = [*turn.prompt[-1:].tolist(), *output]
    offset = len(tail) - size
    # Drafts whose label a worker knows once so many tokens are committed, oldest first.
    due: list[list[tuple[_Label, Keys]]] = [[] for _ in range(size + 1)]
    known_at = [0] * size
    oldest = 0  # no draft proposed before this position is unresolved
    for position in range(1, size):
        cache.extend(turn.name, output[position - 1 : position])
        for label, keys in due[position]:
            history.learn(label.accepted, label.length, position)
            tenant.learn(keys, label.accepted, label.length)
        due[position] = []
        end = prompt_len + position
        room = min(allowed, UNLIMITED - prompt_len) - position - 1
        draft = cache.propose(turn.name, turn.text[:end], room) if room > 0 else None
        if draft is None:
            if room > 0:
                history.took(cache=False)
            continue
        while oldest < position and known_at[oldest] <= position:
            oldest += 1
        last = tail[max(position + offset - 2, 0) : position + offset]
        keys = memory_keys(last, draft.tokens)
        yield (
            DraftState(
                draft,
                prompt_len,
                position,
                allowed,
                position - oldest,
                _copy(history),
                _Recalled(tenant, keys),
                keys,
            ),
            _follow(draft, output, position, keys, due, known_at),
        )
        history.took(cache=_chosen(draft))
    cache.extend(turn.name, output[size - 1 :])
    for label, keys in due[size]:
        history.learn(label.accepted, label.length, size)
        tenant.learn(keys, label.accepted, label.length)


def _follow(
    draft: CacheDraft,
    output: list[int],
    position: int,
    keys: Keys,
    due: list[list[tuple[_Label, Keys]]],
    known_at: list[int],
) -> _Label:
    """The label of a draft proposed at ``position``; books when it is known."""
    length = len(draft.tokens)
    accepted = common_prefix(draft.tokens, output[position : position + length])
    known = position + accepted + (accepted < length)
    label = _Label(position, accepted, length, known > len(output))
    known_at[position] = known
    if not label.censored:
        due[known].append((label, keys))
    return label


def _chosen(draft: CacheDraft) -> bool:
    return min(float(np.float32(draft.score)), len(draft.tokens)) >= POLICY.threshold


_HISTORY: Final = tuple(f.name for f in fields(History))
_DEQUES: Final = [i for i, n in enumerate(_HISTORY) if isinstance(getattr(History(), n), deque)]
_values: Final = attrgetter(*_HISTORY)


def _copy(history: History) -> History:
    """``history`` as it is now: features are computed later, in batches."""
    held = list(_values(history))
    for i in _DEQUES:
        held[i] = held[i].copy()
    return History(*held)


class _Recalled(TenantMemory):
    """What a tenant's memory says of one draft now, for features computed later."""

    __slots__ = ("recalled",)

    def __init__(self, memory: TenantMemory, keys: Keys) -> None:
        self.first, self.log_payoff = memory.first, memory.log_payoff
        self.recalled = memory.recall(keys)

    def recall(self, keys: Keys) -> tuple[float, ...]:
        """What was recalled then."""
        return self.recalled


class _Batches:
    """Collects states, computing their features in batches."""

    def __init__(self, token_classes: FloatArray) -> None:
        self._classes = token_classes
        self._waiting: list[DraftState] = []
        self._features: list[FloatArray] = []
        self._labels: list[tuple[int, int, int, int, bool]] = []

    def add(self, state: DraftState, label: _Label, trace: int) -> None:
        self._waiting.append(state)
        self._labels.append(
            (trace, label.position, label.accepted, label.length, label.censored)
        )  # fmt: skip
        if len(self._waiting) == BATCH:
            self._flush()

    def _flush(self) -> None:
        self._features.append(featurize(self._waiting, self._classes))
        self._waiting.clear()

    def states(self, sessions: Sequence[str]) -> States:
        """All that was added; requests are told apart as learners do."""
        self._flush()
        n = len(self._labels)
        columns = np.array(self._labels, np.int32).reshape(n, 5)
        trace, position, accepted, length, censored = columns.T
        names = np.array([hash_id(f"{s}/{i}") for i, s in enumerate(sessions)], np.uint64)
        rows = empty(n)
        rows.features[:] = np.concatenate(self._features)
        rows.accepted[:], rows.draft_len[:], rows.censored[:] = accepted, length, censored
        rows.model_accepted[:] = np.nan
        rows.step_tokens[:] = 1
        of_session = np.array([hash_id(s) for s in sessions], np.uint64)
        rows.request[:] = names[trace] if n else 0
        rows.session[:] = of_session[trace] if n else 0
        return States(rows, trace.copy(), position.copy())


class ListSink:
    """Keeps the events of cache drafts, and hands every cycle on to those who listen."""

    def __init__(self, *listening: EventSink | None) -> None:
        self.events: list[DraftEvent] = []
        self._listening = [sink for sink in listening if sink is not None]

    def put(self, resolved: Resolved) -> None:
        """Take one event."""
        _, _, _, (cycle, _, _), _ = resolved
        if cycle.draft_len:
            self.events.append(event_of(resolved))
        for sink in self._listening:
            sink.put(resolved)


def replay(
    traces: Iterable[Trace], token_classes: FloatArray, settings: WorkerSettings
) -> list[DraftEvent]:
    """The events of every token position of ``traces``, through the router that serves."""
    sink = ListSink()
    router = DraftRouter(SuffixCache(settings), POLICY, token_classes, sink, False)
    for index, trace in enumerate(traces):
        name = f"{trace.session}/{index}"
        options = RequestOptions(trace.allowed, UNLIMITED, workload=trace.workload)
        router.start(name, np.asarray(trace.prompt, np.int32), options)
        for position, token in enumerate(trace.output, start=1):
            router.observe([Committed(name, [int(token)], 0)], step_tokens=1)
            if position < len(trace.output):
                router.choose([name])
        router.stop(name, "stop")
    router.settle()
    return sink.events
