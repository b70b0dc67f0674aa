"""Cache drafts: continuations copied from the prompt or from earlier outputs.

A thin room around ArcticInference's suffix trees (SuffixDecoding, arXiv 2411.04975). A tenant has a
tree of finished outputs of its own, so that one tenant's text never becomes another's draft.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.settings import WorkerSettings

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CacheDraft:
    """A linear draft, deterministic given the prefix.

    ``probs[i]`` is the counted probability that the draft survives through token i (a running
    product, so it never rises); ``score`` is their sum, the accepted length that counting expects;
    ``match_len`` is the number of context tokens matched. ``local`` says that the request's own
    tree proposed it, and not the tenant's. ``rival`` is what the other tree had to say, if
    anything, and ``agreement`` the number of tokens on which both begin alike.
    """

    tokens: list[int]
    probs: list[float]
    score: float
    match_len: int
    local: bool = True
    rival: CacheDraft | None = None
    agreement: int = 0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens on which ``a`` and ``b`` begin alike."""
    if a == b:
        return len(a)
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


class SuffixCache:
    """Suffix trees of the active requests and, by tenant, of finished outputs."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._tenants: OrderedDict[str, Any] = OrderedDict()
        self._active: dict[str, Any] = {}

    @property
    def max_tenants(self) -> int:
        """Tenants whose trees are kept."""
        return self._settings.suffix_tenants

    def start(self, request: str, prompt: Tokens, tenant: str) -> None:
        """Index ``prompt`` (int32 [n], contiguous). Mutates the tenant's cache.

        Raises:
            ValueError: the request is active already.
        """
        if request in self._active:
            raise ValueError(f"request {request!r} is active already")
        cache = self._cache_of(tenant)
        cache.start_request(request, prompt)
        self._active[request] = cache

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Append committed tokens. Mutates the request's tree and the tenant's."""
        self._active[request].add_active_response(request, tokens)

    def propose(self, request: str, context: Tokens, limit: int) -> CacheDraft | None:
        """The best continuation of ``context`` (int32 [n]) of at most ``limit`` tokens, or None."""
        s, cache = self._settings, self._active[request]
        seen = context[-s.suffix_max_depth :]
        tokens = min(limit, s.suffix_max_draft)
        # The library's own ``speculate`` keeps the better of the two and drops the other, which
        # says whether they agree. Its trees are private, hence its pinned version.
        local, shared = (
            tree.speculate_ndarray(
                seen, tokens, s.suffix_max_factor, s.suffix_max_offset, s.suffix_min_prob, False
            )
            for tree in (cache._local_trees[request], cache._global_tree)
        )
        is_local = local.score >= shared.score
        best, other = (local, shared) if is_local else (shared, local)
        drafted = best.token_ids
        if not drafted:
            return None
        against = other.token_ids
        if not against:
            return CacheDraft(drafted, best.probs, best.score, best.match_len, is_local)
        rival = CacheDraft(against, other.probs, other.score, other.match_len, not is_local)
        agreement = common_prefix(drafted, against)
        return CacheDraft(
            drafted, best.probs, best.score, best.match_len, is_local, rival, agreement
        )

    def stop(self, request: str) -> None:
        """Forget the request's prompt; its output stays for the tenant until evicted."""
        self._active.pop(request).stop_request(request)

    def _cache_of(self, tenant: str) -> Any:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        if tenant not in self._tenants:
            self._tenants[tenant] = SuffixDecodingCache(
                max_tree_depth=self._settings.suffix_max_depth,
                max_cached_requests=self._settings.suffix_cached_requests,
            )
            if len(self._tenants) > self._settings.suffix_tenants:
                # Requests still running keep their own reference, so the eviction hurts nobody.
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return self._tenants[tenant]
