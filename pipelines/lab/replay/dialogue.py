"""A suffix cache for replaying dialogues: a turn goes on in the tree of the turn before.

A prompt of a later turn begins with the earlier prompt and its output. Indexing it anew for every
turn takes most of a replay of long dialogues; here only what is new is added. The drafts are those
of a tree built at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache
from arctic_inference.suffix_decoding._C import SuffixTree

from decoder.drafting.drafts import CacheDraft, Limits, better_of, reach_of
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from pipelines.lab.replay.traces import Ids, Trace

KEPT: Final = 2_000
"""Outputs kept for later requests, the oldest given up first."""
UNLIMITED: Final = 1 << 20
"""Context length of a replay: a recorded output has room, or it would not have been recorded."""


class ContinuedTrees(SuffixDecodingCache):  # type: ignore[misc]
    """ArcticInference's cache, except that the tree of a stopped request may be continued.

    Attributes:
        continued: requests that went on in an earlier one's tree.
    """

    def __init__(self, depth: int, cached_requests: int) -> None:
        super().__init__(max_tree_depth=depth, max_cached_requests=cached_requests)
        self.continued = 0
        self._waiting: dict[str, tuple[Any, Ids]] = {}
        self._next: tuple[str, Ids] | None = None

    def expect(self, session: str, text: Ids) -> None:
        """The next request to start is of ``session``, and will hold ``text`` when it ends.

        Args:
            text: int32 [n], prompt and output.
        """
        self._next = session, text

    def start_request(self, req_id: str, prompt_token_ids: Ids) -> None:
        """Index a prompt, int32 [n], from where its session's last turn ended if it goes on."""
        session, text = self._next or ("", prompt_token_ids)
        self._next = None
        tree, known = self._waiting.pop(session, (None, None))
        goes_on = known is not None and np.array_equal(prompt_token_ids[: len(known)], known)
        first = prompt_token_ids[:0] if goes_on else prompt_token_ids
        super().start_request(req_id, np.ascontiguousarray(first))
        if goes_on and known is not None:
            self.continued += 1
            self._local_trees[req_id] = tree
            rest = np.ascontiguousarray(prompt_token_ids[len(known) :])
            SuffixTree.extend_ndarray(tree, 0, rest)
        if session:
            self._waiting[session] = self._local_trees[req_id], text

    def forget(self, session: str) -> None:
        """The session is over."""
        self._waiting.pop(session, None)


class DialogueCache(SuffixCache):
    """The decoder's suffix cache over :class:`ContinuedTrees`: all keys share, all is indexed at
    once, and nothing is counted in bytes."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.trees = ContinuedTrees(settings.suffix_max_depth, KEPT)
        self._reach: dict[str, int] = {}

    def start(self, request: str, prompt: Ids, key: str) -> None:
        """Index ``prompt``, int32 [n], as far as its session's tree does not hold it."""
        self.trees.start_request(request, prompt)
        self._reach[request] = self.depth

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self._reach[request] += len(tokens)
        self.trees.add_active_response(request, tokens)

    def propose(
        self,
        request: str,
        context: Ids,
        limit: int,
        limits: Limits | None = None,
    ) -> CacheDraft | None:
        """The best continuation of ``context`` of at most ``limit`` tokens, or None."""
        own, shared = self.trees._local_trees[request], self.trees._global_tree
        reach = min(self._reach[request], self.depth)
        asked = limits or Limits(reach, self.most, self.limits)
        seen = context[-asked.depth :]
        draft, matched = better_of(own, shared, seen, min(limit, asked.most), asked.of_draft)
        if limits is None:
            self._reach[request] = reach_of(matched)
        return draft

    def stop(self, request: str) -> None:
        """Forget the request, but for a next turn of its session."""
        self._reach.pop(request, None)
        self.trees.stop_request(request)


@dataclass(frozen=True, slots=True)
class Turn:
    """A recording whose request is under way in a suffix cache, under ``name``."""

    index: int
    name: str
    trace: Trace
    prompt: Ids
    output: list[int]
    text: Ids  # prompt and output, contiguous

    @classmethod
    def of(cls, index: int, trace: Trace) -> Turn:
        """Recording number ``index``."""
        prompt, output = np.array(trace.prompt, np.int32), np.asarray(trace.output, np.int32)
        text = np.concatenate([prompt, output])
        return cls(index, str(index), trace, prompt, output.tolist(), text)


def last_turns(traces: Sequence[Trace]) -> dict[str, int]:
    """The number of each session's last turn."""
    return {trace.session: index for index, trace in enumerate(traces)}


def turns(traces: Sequence[Trace], cache: DialogueCache) -> Iterator[Turn]:
    """Each recording in its order; its request begins before and stops after it is handed out."""
    last = last_turns(traces)
    for index, trace in enumerate(traces):
        turn = Turn.of(index, trace)
        cache.trees.expect(trace.session, turn.text)
        cache.start(turn.name, turn.prompt, "")
        yield turn
        cache.stop(turn.name)
        if last[trace.session] == index:
            cache.trees.forget(trace.session)
