"""From what a person names after ``--methods`` and ``--policy`` to decoding methods.

``frequency:4`` is the frequency rule at a score of 4, ``arctic:3`` works alike with its ``k``,
``eagle3:2`` drafts two tokens, ``hybrid:2.5`` is the learned policy at another threshold, and
``hybrid:paper`` decides by the bundle that was named with ``--policy paper=FILE``.
``suffix@2`` (behind a label, if there is one) lets a cache draft have two tokens for each one
matched: the baselines have one, Table 7 of the paper, and ``hybrid`` what the worker is set to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from decoder.contracts.errors import ModelError, SettingsError
from pipelines.bench.commas import words
from pipelines.policy.bundles import digest_of

if TYPE_CHECKING:
    from decoder.contracts.bundle import Policy
    from decoder.engines.reference.method import Method

CHAIN: Final = "eagle3"
LEARNED: Final = ("hybrid", "hybrid-tree")
BY_LENGTH: Final = "arctic"
SHIPPED: Final = ""
"""Label of the policy that ``hybrid`` without a label decides by: the first policy, unless another
is named."""


def names(text: str) -> list[str]:
    """The method names in ``text``, separated by commas, each once; greedy where oracle needs it.

    Raises:
        SettingsError: there is none, or one is unknown.
    """
    from decoder.engines.reference.method import METHODS

    found = list(words(text))
    if not found:
        raise SettingsError("--methods names none: give for example greedy,eagle3,suffix,hybrid.")
    unknown = sorted({_base(name) for name in found} - set(METHODS))
    if unknown:
        raise SettingsError(f"no method {', '.join(unknown)}: there are {', '.join(METHODS)}.")
    if "oracle" in found and "greedy" not in found:
        found.insert(0, "greedy")
    return found


def policy_files(given: Sequence[str]) -> dict[str, Path]:
    """Bundles by label: ``FILE`` stands for ``hybrid`` itself, ``label=FILE`` for that label."""
    files = {}
    for text in given:
        label, separator, path = text.partition("=")
        files[label if separator else SHIPPED] = Path(path if separator else text)
    return files


def describe(policy: Policy) -> str:
    """A policy in a few words, for the settings of a run."""
    decided = "live rate" if policy.kind == "survival" else f"threshold {policy.threshold:g}"
    return f"version {policy.version}, {policy.kind}, {decided}, {digest_of(policy)[:12]}"


def build(
    wanted: Sequence[str], policies: dict[str, Policy], has_drafter: bool, model_len: int
) -> tuple[Method, ...]:
    """The methods called ``wanted``.

    Args:
        policies: by label; ``hybrid`` and ``hybrid-tree`` without a label take ``SHIPPED``.
        model_len: tokens of the drafter's chain; ``arctic`` compares scores with it.

    Raises:
        SettingsError: a label is neither a number nor a policy.
        EngineError: there is no such method.
        ModelError: a method drafts with a model and there is no drafter.
    """
    methods = tuple(_one(name, policies, model_len) for name in wanted)
    drafting = [m.name for m in methods if m.model != "none"]
    if drafting and not has_drafter:
        raise ModelError(
            f"{', '.join(drafting)} need a drafter made for this model: name it with --drafter, or "
            "leave them out of --methods."
        )
    return methods


def _one(name: str, policies: dict[str, Policy], model_len: int) -> Method:
    from decoder.engines.reference.method import method

    called, _, factor = name.partition("@")
    base, _, label = called.partition(":")
    if base in LEARNED and label in policies:
        made = method(base, policy=policies[label])
    elif base in LEARNED:
        made = method(base, policy=policies.get(SHIPPED), threshold=_given(name, label))
    elif base == CHAIN and label:
        made = replace(method(base), model_limit=int(_given(name, label) or 1))
    elif base == BY_LENGTH:
        made = method(base, k=int(_given(name, label) or model_len))
    elif base == "frequency":
        made = method(base, threshold=_given(name, label))
    else:
        made = method(called)  # knows no labels, and says so
    if factor:
        made = replace(made, draft_factor=_factor(name, factor))
    return replace(made, name=name)


def _base(name: str) -> str:
    return name.partition("@")[0].partition(":")[0]


def _factor(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < 65.0:
        raise SettingsError(f"method {name!r}: {text!r} is no factor above 0 and up to 64.")
    return found


def _given(name: str, label: str) -> float | None:
    try:
        return float(label) if label else None
    except ValueError:
        raise SettingsError(
            f"method {name!r}: {label!r} is neither a number nor a label of --policy."
        ) from None
