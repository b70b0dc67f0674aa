"""Decodes recorded generations with the worker's router.

With greedy decoding the target's output does not depend on drafts. A recorded output, with the
model draft's accepted length at each position, therefore says what any policy would have committed
in each cycle. Drafts, features, decisions and labels are the router's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.core.costs import LiveCosts
from decoder.core.payoff.model_arm import chance_of
from decoder.core.router import Decision, DraftRouter, RequestOptions
from decoder.drafting.suffix import SuffixCache
from decoder.policy.pricing import NOMINAL, CostTable, Floats
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE
from decoder.settings import WorkerSettings
from learner.evaluation.independent import cost_shares
from learner.training.rows import Rows, from_batch
from pipelines.replay.cache_drafts import common_prefix, propose
from pipelines.replay.method import Method
from pipelines.replay.rivals import deciding

UNLIMITED: Final = 1 << 20  # context length of a replay; the recorded output fitted its own


Ids = NDArray[np.int32]
Ints = NDArray[np.int32]


ALLOWED: Final = 1024  # output tokens that a request may generate if the recording does not say


@dataclass(frozen=True)
class Trace:
    """One recorded generation as token ids. Turns of one dialogue share a ``session``."""

    session: str
    prompt: Sequence[int] | Ids
    output: Sequence[int] | Ids
    workload: str = ""
    allowed: int = ALLOWED
    """Output tokens the request might have generated. Never the recorded length: a feature or draft
    limited by it would leak where the output ends."""
    model_accepted: Sequence[int] | Ids | None = None
    """The model draft's accepted length at each output position; None if not recorded."""
    licence: str = ""
    """The line's ``license``."""


class Cycle(NamedTuple):
    """One cycle of recording ``trace``; lengths in tokens. An output's first token comes from its
    prefill and belongs to no cycle."""

    trace: int
    position: int  # output tokens committed before
    arm: int  # of ``decoder.policy.rule``
    verified: int  # draft tokens
    accepted: int  # draft tokens committed
    committed: int  # tokens

    @property
    def drafted(self) -> int:
        """Tokens of the model draft."""
        return self.verified if self.arm == MODEL else 0


@dataclass(frozen=True)
class Cycles:
    """The fields of :class:`Cycle` as columns [n], ordered by recording and position."""

    trace: Ints
    position: Ints
    arm: Ints
    verified: Ints
    accepted: Ints
    committed: Ints

    @classmethod
    def of(cls, cycles: Iterable[Cycle]) -> Cycles:
        """``cycles`` as columns."""
        return cls(*np.array(list(cycles), np.int32).reshape(-1, len(Cycle._fields)).T)

    @property
    def drafted(self) -> Ints:
        """Tokens of the model draft [n]."""
        return np.where(self.arm == MODEL, self.verified, 0).astype(np.int32)

    def times(self, costs: CostTable) -> NDArray[np.float64]:
        """Time of each cycle at batch size 1: float64 [n]."""
        most = int(self.drafted.max(initial=0))
        drafting = np.array([costs.drafting(k, 1) for k in range(most + 1)])
        total: NDArray[np.float64] = costs.verifying(1 + self.verified) + drafting[self.drafted]
        return total

    def rate(self) -> float:
        """Tokens committed in the time of a plain step, at batch size 1 and nominal costs."""
        return float(self.committed.sum() / self.times(NOMINAL).sum())


def constant_acceptance(mean: float, length: int) -> NDArray[np.int32]:
    """Accepted lengths [length] of a model draft with this ``mean`` over every long window:
    integers, spread as evenly as possible."""
    steps = np.floor(np.arange(length + 1) * mean + 1e-9)
    return np.diff(steps).astype(np.int32)


def drawn_acceptance(
    mean: float, most: int, length: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """:func:`drawn_by_position` with the same probability at each of ``most`` positions, chosen so
    that ``mean`` tokens of a draft are accepted."""
    return drawn_by_position([chance_of(mean, most)] * most, length, rng)


def drawn_by_position(
    chances: Sequence[float], length: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Accepted lengths [length] of a drafter whose token at each position of a draft is accepted
    with these ``chances``, given those before it.

    Each token of the text is easy or hard for every draft that reaches it, so neighbouring
    positions are correlated as with a real drafter.
    """
    hard = rng.random(length + len(chances))
    accepted = np.zeros(length, np.int32)
    alive = np.ones(length, np.bool_)
    for ahead, chance in enumerate(chances):
        alive &= hard[ahead : ahead + length] < chance
        accepted += alive
    return accepted


def model_acceptance(trace: Trace, mean: float | None) -> NDArray[np.int32]:
    """The model draft's accepted length at each position of ``trace``.

    Args:
        mean: used if the recording does not hold it.

    Raises:
        TraceError: the recording does not hold it, and there is no ``mean``.
    """
    if trace.model_accepted is not None:
        return np.asarray(trace.model_accepted, np.int32)
    if mean is None:
        raise TraceError(
            f"session {trace.session} was recorded without a model arm: say what it accepts with "
            "--model-accepts."
        )
    return constant_acceptance(mean, len(trace.output))


@dataclass(frozen=True, slots=True)
class Turn:
    """A recording whose request runs in a suffix cache, under ``name``."""

    index: int
    name: str
    trace: Trace
    prompt: Ids
    output: list[int]
    text: Ids  # prompt and output, contiguous
    row: int = 0  # its window in the cache

    @classmethod
    def of(cls, index: int, trace: Trace) -> Turn:
        """Recording number ``index``."""
        prompt, output = np.array(trace.prompt, np.int32), np.asarray(trace.output, np.int32)
        text = np.concatenate([prompt, output])
        return cls(index, str(index), trace, prompt, output.tolist(), text)


def turns(traces: Sequence[Trace], cache: SuffixCache) -> Iterator[Turn]:
    """Yield each recording, in order, while its request runs in ``cache``."""
    for index, trace in enumerate(traces):
        turn = Turn.of(index, trace)
        row = cache.start(turn.name, turn.prompt, "")
        cache.index(None)
        yield replace(turn, row=row)
        cache.stop(turn.name)


class CycleCosts:
    """Time of a cycle by the tokens it verifies: ``cache`` [tokens + 1], ``model`` [tokens + 1]."""

    def __init__(self, costs: CostTable, settings: WorkerSettings) -> None:
        lengths = np.arange(settings.suffix_max_draft + 1)
        drafting = [costs.drafting(k, 1) for k in range(settings.model_draft_tokens + 1)]
        few = lengths[: len(drafting)]
        self.cache: Floats = cost_shares(costs, 1, lengths, lengths)
        self.model: Floats = cost_shares(costs, 1, few, few, drafting, 1)

    def of(self, arm: int, verified: int) -> float:
        """Time of one cycle."""
        return float((self.model if arm == MODEL else self.cache)[verified])


def oracle_cycles(
    traces: Sequence[Trace],
    prices: Sequence[CycleCosts],
    settings: WorkerSettings,
    mean: float | None = None,
    warm: int = 0,
) -> Iterator[tuple[Cycle, float]]:
    """The oracle: the cycles, and their times, that commit most for their time.

    Args:
        prices: the costs of each of ``traces``.
        mean: accepted length of model drafts where a recording does not hold it.
        warm: the first traces only fill the cache.
    """
    cache = SuffixCache(settings)
    for turn in turns(traces, cache):
        output, price, done = turn.output, prices[turn.index], 1
        if turn.index < warm:
            cache.extend(turn.name, output)
            continue
        model = model_acceptance(turn.trace, mean).tolist()
        cache.extend(turn.name, output[:1])
        while done < len(output):
            room = min(turn.trace.allowed - done, UNLIMITED) - 1
            longest = min(room, len(price.model) - 1)
            options = [(NONE, 0, 0)]
            options += [(MODEL, k, min(model[done], k)) for k in range(1, longest + 1)]
            context = turn.text[: len(turn.prompt) + done]
            draft = propose(cache, turn.row, context, room) if room > 0 else None
            if draft is not None:
                same = common_prefix(draft.tokens, output[done : done + len(draft.tokens)])
                options.append((CACHE if same else NONE, same, same))
            arm, verified, accepted = max(options, key=lambda o: (1 + o[2]) / price.of(o[0], o[1]))
            committed = output[done : done + accepted + 1]
            cycle = Cycle(
                turn.index, done, arm, verified, min(accepted, len(committed)), len(committed)
            )
            yield cycle, price.of(arm, verified)
            cache.extend(turn.name, committed)
            done += len(committed)


PAST: Final = 0  # an arbitrary token, for positions behind the end of an output


class Engine:
    """Decodes recordings one after the other with a given router."""

    def __init__(
        self,
        router: DraftRouter,
        cache: SuffixCache,
        traces: Sequence[Trace],
        has_model: bool = True,
        model_mean: float | None = None,
        usual: bool = True,
    ) -> None:
        """Disables the router's pauses, which depend on this machine's time.

        Args:
            cache: the router's.
            model_mean: accepted length of model drafts where a recording does not hold it.
            usual: False keeps the router from learning costs by this machine's clock, and resolves
                labels at once instead of in the next step.
        """
        router.controller.pauses = False
        self._router, self._cache, self._traces = router, cache, traces
        self._has_model, self._mean, self._usual = has_model, model_mean, usual

    def decode(self, index: int, tenant: str = "") -> Iterator[Cycle]:
        """Yield the cycles of a recording; each before the router observes its outcome.

        Raises:
            TraceError: the recording lacks the model arm.
        """
        trace, router = self._traces[index], self._router
        turn = Turn.of(index, trace)
        model = model_acceptance(trace, self._mean).tolist() if self._has_model else []
        # a token that occurs only at the end acts as the request's stop id
        ends = frozenset(turn.output[-1:]) - frozenset(turn.output[:-1])
        options = RequestOptions(
            trace.allowed, UNLIMITED, ends, session=trace.session, workload=trace.workload,
            tenant=tenant,
        )  # fmt: skip
        router.start(turn.name, turn.prompt, options)
        self._cache.index(None)
        report = router.report([turn.name], [turn.output[:1]])
        router.observe(report)
        # an engine reports all accepted tokens of a draft that extends behind the end
        text = [*turn.output, PAST] if ends or len(turn.output) >= trace.allowed else turn.output
        done = 1
        while done < len(turn.output):
            (decision,) = router.choose(report)
            cycle = _verified(decision, turn, model, done)
            router.drafted(report, [cycle.verified], cycle.drafted)
            yield cycle
            committed = text[done : done + cycle.accepted + 1]
            tokens, verified = [committed], cycle.verified
            report = router.report([turn.name], tokens, verified, 0, 1 + verified)
            report.timed = self._usual
            router.observe(report)
            if not self._usual:
                router.flush()
            done += cycle.committed
        router.stop(turn.name, "stop")
        router.flush()


def _verified(decision: Decision, turn: Turn, model: Sequence[int], done: int) -> Cycle:
    """The cycle that ``decision`` leads to: its draft is compared with the recording."""
    length = accepted = 0
    if decision.arm == "cache":
        length = len(decision.tokens)
        accepted = common_prefix(decision.tokens, turn.output[done : done + length])
    elif decision.arm == "model":
        length = decision.room
        accepted = min(model[done], length)
    committed = len(turn.output[done : done + accepted + 1])
    arm = ARMS.index(decision.arm) if length else NONE
    return Cycle(turn.index, done, arm, length, min(accepted, committed), committed)


@dataclass(frozen=True)
class Simulator:
    """Decodes recordings one after the other.

    ``model_mean`` is the accepted length of model drafts where a recording does not hold it.
    ``costs`` are the fixed costs that policies decide by.
    """

    token_classes: FloatArray
    settings: WorkerSettings
    model_mean: float | None = None
    costs: CostTable = NOMINAL

    def decode(
        self,
        traces: Sequence[Trace],
        method: Method,
        warm_up: Sequence[Trace] = (),
        guarded: bool = False,
    ) -> tuple[Cycles, Rows]:
        """Decode ``traces`` by ``method``.

        Args:
            warm_up: decoded first, to fill cache and memory; not in the result.
            guarded: whether a worker's guards may override the policy.

        Returns:
            the cycles, and the labelled cache drafts proposed in them.

        Raises:
            TraceError: a recording lacks the model arm.
        """
        cache = SuffixCache(method.drafting(self.settings))
        costs = LiveCosts(self.costs, live=False)
        log, choice = deciding(method)
        router = method.router(
            self.settings, cache, self.token_classes, costs, guarded, log, choice
        )
        every = [*warm_up, *traces]
        engine = Engine(router, cache, every, method.model, self.model_mean)
        warm = len(warm_up)
        made = [c for index in range(len(every)) for c in engine.decode(index)]
        cycles = [c._replace(trace=c.trace - warm) for c in made if c.trace >= warm]
        batch = log.batch()
        trace = np.array(batch.names["request"], np.int64)
        order = np.lexsort((batch.numbers["position"], trace))
        return Cycles.of(cycles), from_batch(batch.take(order[trace[order] >= warm]))
