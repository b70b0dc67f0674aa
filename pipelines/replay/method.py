"""A decoding method: a policy for the router, and options of its arms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoder.contracts.bundle import MAX_DRAFT, Policy
from decoder.contracts.errors import EngineError
from decoder.contracts.features import FloatArray
from decoder.core.choice import Chosen, Step, choose
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings

if TYPE_CHECKING:
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.session import Session

Rule = Callable[[Policy, Step], Chosen]


@dataclass(frozen=True)
class Method:
    """How requests are decoded.

    ``model``: whether there is a model arm; without it, the arm ``none`` takes its place. Without
    ``cache`` there is no suffix cache, so a baseline pays only for what it uses, and nothing is
    labelled. ``model_limit`` truncates model drafts to that many tokens. ``draft_factor`` replaces
    the worker's ``suffix_max_factor``. ``rule`` makes a decision rule, which the caller passes to
    the router instead of :func:`choose`.
    """

    name: str
    policy: Policy
    model: bool = True
    cache: bool = True
    draft_factor: float | None = None
    model_limit: int | None = None
    rule: Callable[[], Any] | None = None

    def drafting(self, settings: WorkerSettings) -> WorkerSettings:
        """``settings`` with the method's own values."""
        own = {} if self.draft_factor is None else {"suffix_max_factor": self.draft_factor}
        return settings.model_copy(update=own)

    def longest(self, settings: WorkerSettings) -> int:
        """Longest model draft, in tokens; 0 without a model arm."""
        return min(settings.model_draft_tokens, self.model_limit or MAX_DRAFT) * self.model

    def router(
        self,
        settings: WorkerSettings,
        cache: SuffixCache | None,
        token_classes: FloatArray,
        costs: LiveCosts | None,
        guarded: bool,
        sink: Sink | None = None,
        rule: Rule = choose,
    ) -> DraftRouter:
        """A router for the method; its events go to ``sink``.

        Raises:
            EngineError: the method has its own rule, and ``rule`` was not passed.
        """
        if self.rule is not None and rule is choose:
            raise EngineError(f"method {self.name!r} decides by a rule: pass it.")
        router = DraftRouter(
            cache, self.policy, token_classes, sink or Sink(None),
            model_len=self.longest(settings), guarded=guarded,
        )  # fmt: skip
        router.costs, router.rule = costs or router.costs, rule
        return router

    def session(
        self,
        engine: ReferenceEngine,
        costs: LiveCosts | None = None,
        guarded: bool = False,
        sink: Sink | None = None,
        rule: Rule = choose,
    ) -> Session:
        """A session of the reference engine; arguments and errors as :meth:`router`."""
        from decoder.engines.reference.session import Session

        settings = engine.settings
        cache = SuffixCache(self.drafting(settings)) if self.cache else None
        router = self.router(settings, cache, engine.token_classes, costs, guarded, sink, rule)
        return Session(engine, router, self.longest(settings))
