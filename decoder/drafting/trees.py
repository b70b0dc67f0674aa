"""Suffix trees in pieces, so that neither indexing a long text nor freeing it stops a step.

ArcticInference's tree (arXiv 2411.04975) takes 0.7 to 3.5 us to index a token and, once it has
outgrown the processor's caches, as long to free it: 94 to 129 ms for 128k tokens, during which no
other thread of Python runs. What it can do by the piece is remove one of its sequences. So a long
text is indexed as sequences of ``SEGMENT`` tokens, each with the last tokens of the text before it,
and a tree is freed sequence by sequence. A text of up to ``WHOLE`` tokens is one sequence, and its
drafts are exactly the library's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

SEGMENT: Final = 384
"""Tokens of a sequence in a long text: removing one takes 1 to 2 us a token in a large tree."""
OVERLAP: Final = 32
"""Tokens of the text before a segment that its sequence begins with, so that what is copied across
the border is still found. A draft across it is counted at half its probability."""
WHOLE: Final = 2048
"""Tokens of a tree that may be dropped at once: 0.2 to 0.7 us a token while it fits the caches."""
TOKEN_BYTES: Final = 512
"""Bytes of a tree for each token indexed, at most: by the library's own estimate 500 for random
text of two words, the worst there is, 300 to 330 for ordinary text and 25 to 60 for loops. The
estimate walks the tree, 20 ms for 128k tokens, so it is a test's and not a step's."""
SEQUENCE_BYTES: Final = 2048
"""Bytes of a sequence beside its tokens: two tables' slots and a window of 64 nodes."""
TREE_BYTES: Final = 4096
"""Bytes of a tree without tokens, and of what Python holds for it."""
DROPPED: Final = 2
"""Tokens of a small tree that are dropped in the time of indexing one."""
_LATER: Final = 1 << 24
"""Sequences of outputs that outgrew their first one are numbered from here."""
_SEQUENCES: Final = 0x7FFFFFFF


def bytes_of(tokens: int, sequences: int = 1) -> int:
    """Bytes that ``tokens`` in so many sequences may take."""
    return tokens * TOKEN_BYTES + sequences * SEQUENCE_BYTES


@dataclass(slots=True)
class Shared:
    """The tree of the outputs that requests of one key may copy from. ``users`` are active."""

    key: str
    owner: str
    tree: Any
    users: int = 0
    sequences: int = 0
    next: int = 0

    def new_sequence(self) -> int:
        """The id of a sequence that is not in the tree."""
        self.next = (self.next + 1) & _SEQUENCES
        self.sequences += 1
        return self.next


@dataclass(slots=True)
class Dead:
    """Sequences to remove from ``tree``, the next one last; ``tokens`` in all of them.

    If ``whole``, nobody uses the tree any more.
    """

    tree: Any
    sequences: list[tuple[int, int]]  # id, tokens
    tokens: int
    whole: bool


@dataclass(slots=True)
class Backlog:
    """What of a prompt is not indexed yet. Ranges are [start, end) with their sequence's id."""

    prompt: Tokens
    ranges: list[tuple[int, int, int]]  # the next one last
    behind: list[int] = field(default_factory=list)  # output, while the end of the prompt waits


def ranges_of(length: int) -> list[tuple[int, int, int]]:
    """A prompt of ``length`` tokens in ranges to index, with sequence ids from 0; the last first.

    Recent text comes first, since it is copied most (a question's document, a loop's last round)
    and since the output goes on from there: it can then be indexed as it comes.
    """
    if length <= WHOLE:
        return [(0, length, 0)] if length else []
    ends = range(length, 0, -SEGMENT)
    ranges = [(max(0, end - SEGMENT - OVERLAP), end, i) for i, end in enumerate(ends)]
    return ranges[::-1]


class Local:
    """A request's own tree: its prompt, by slices, and its output."""

    __slots__ = ("_closed", "_live", "_live_tokens", "_part", "_room", "backlog", "tokens", "tree")

    def __init__(self, tree: Any, prompt: Tokens) -> None:
        """Index nothing yet. ``prompt`` is int32 [n], contiguous, and kept until indexed."""
        self.tree = tree
        ranges = ranges_of(len(prompt))
        self.backlog: Backlog | None = Backlog(prompt, ranges) if ranges else None
        self.tokens = 0  # indexed
        self._closed: list[tuple[int, int]] = []  # sequences that grow no more, with their tokens
        self._live, self._live_tokens = 0, 0  # the sequence that the output goes on
        self._part = 0  # tokens indexed of the range under way
        self._room = WHOLE if len(prompt) <= WHOLE else SEGMENT

    @property
    def follows(self) -> bool:
        """Whether the prompt's end is indexed, so that output is as it comes."""
        return self.backlog is None or self._live_tokens > 0

    @property
    def sequences(self) -> int:
        """Sequences in the tree."""
        return len(self._closed) + (self._live_tokens > 0) + (self._part > 0)

    def index(self, most: int) -> int:
        """Index at most ``most`` tokens of the backlog; how many it were. Mutates."""
        backlog = self.backlog
        if backlog is None:
            return 0
        start, end, sequence = backlog.ranges[-1]
        start += self._part
        count = min(most, end - start)
        self.tree.extend_ndarray(sequence, backlog.prompt[start : start + count])
        self.tokens += count
        self._part += count
        if start + count < end:
            return count
        backlog.ranges.pop()
        if sequence == self._live:
            self._live_tokens, self._part = self._part, 0
            if backlog.behind:
                self._append(backlog.behind)
                count += len(backlog.behind)
        else:
            self._closed.append((sequence, self._part))
            self._part = 0
        self.backlog = Backlog(backlog.prompt, backlog.ranges) if backlog.ranges else None
        return count

    def extend(self, tokens: Sequence[int], recent: Sequence[int]) -> int:
        """Append output; how many tokens were indexed. Mutates.

        Args:
            recent: the text's last tokens, ``tokens`` not among them.
        """
        backlog = self.backlog
        if backlog is not None and not self._live_tokens:  # not yet follows
            backlog.behind += tokens
            return 0
        if self._live_tokens >= self._room:
            self._closed.append((self._live, self._live_tokens))
            self._live, self._live_tokens, self._room = _LATER + len(self._closed), 0, SEGMENT
            tokens = [*recent[-OVERLAP:], *tokens]
        self._append(tokens)
        return len(tokens)

    def dead(self) -> Dead:
        """All of it, to be freed; the smallest sequences go first."""
        sequences = list(self._closed)
        if self._live_tokens:
            sequences.append((self._live, self._live_tokens))
        if self._part and self.backlog is not None:
            sequences.append((self.backlog.ranges[-1][2], self._part))
        sequences.sort(key=lambda sequence: -sequence[1])
        return Dead(self.tree, sequences, self.tokens, True)

    def _append(self, tokens: Sequence[int]) -> None:
        self.tree.extend(self._live, tokens)
        self.tokens += len(tokens)
        self._live_tokens += len(tokens)


class Graveyard:
    """What nobody uses any more, freed a piece at a time."""

    def __init__(self) -> None:
        self._dead: deque[Dead] = deque()
        self.held = 0  # bytes

    def __len__(self) -> int:
        return len(self._dead)

    def put(self, dead: Dead) -> None:
        """Take over what is to be freed. Mutates."""
        self.held += bytes_of(dead.tokens, len(dead.sequences))
        self._dead.append(dead)

    def free(self, most: int) -> int:
        """Free one piece or more, until it took as long as indexing ``most`` tokens. Mutates.

        Returns:
            Tokens that could have been indexed in the time.
        """
        done = 0
        while self._dead and done < most:
            done += self._free_one()
        return done

    def _free_one(self) -> int:
        dead = self._dead[0]
        if dead.whole and dead.tokens <= WHOLE + SEGMENT:
            self._dead.popleft()
            self.held -= bytes_of(dead.tokens, len(dead.sequences))
            return max(dead.tokens // DROPPED, 1)
        sequence, tokens = dead.sequences.pop()
        dead.tree.remove(sequence)
        dead.tokens -= tokens
        self.held -= bytes_of(tokens)
        if not dead.sequences:
            self._dead.popleft()
        return tokens
