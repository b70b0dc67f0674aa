"""Parses the lists of ``--methods`` and ``--policy`` into decoding methods.

``frequency:4`` is the frequency rule at a score of 4, ``arctic:3`` sets its ``k``, ``eagle3:2``
drafts two tokens, and ``hybrid:paper`` decides by the bundle of ``--policy paper=FILE``.
``suffix@2`` drafts two tokens for each matched one; the baselines draft one (paper, Table 7), and
``hybrid`` follows the worker's setting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from decoder.contracts.errors import ModelError, SettingsError

if TYPE_CHECKING:
    from decoder.contracts.bundle import Policy
    from pipelines.replay.method import Method

LEARNED: Final = "hybrid"
NUMBERED: Final = ("eagle3", "frequency", "arctic")
SHIPPED: Final = ""
"""Label of the policy of a plain ``hybrid``: the first policy, unless another is named."""
NAME: Final = re.compile(r"(?P<base>[^:@]+)(:(?P<label>[^@]+))?(@(?P<factor>\d+(\.\d+)?))?")


def words(text: str) -> tuple[str, ...]:
    """The comma-separated words, without duplicates."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """The comma-separated positive numbers, without duplicates.

    Raises:
        SettingsError: there are none, or something is no positive number.
    """
    parts = words(text)
    if not parts or not all(word.isdecimal() and int(word) for word in parts):
        raise SettingsError(f"{option} {text!r}: give positive numbers with commas between them.")
    return tuple(int(word) for word in parts)


def names(text: str) -> tuple[str, ...]:
    """The comma-separated method names, without duplicates.

    Raises:
        SettingsError: there is none, or one is unknown.
    """
    from pipelines.replay.rivals import METHODS

    listed_names = words(text)
    unknown = [name for name in listed_names if re.split("[:@]", name)[0] not in METHODS]
    if unknown or not listed_names:
        listed = ", ".join(unknown) or "was named"
        raise SettingsError(f"no method {listed}: there are {', '.join(METHODS)}.")
    return listed_names


def policy_files(given: Sequence[str]) -> dict[str, Path]:
    """Bundles by label; ``FILE`` without a label is ``SHIPPED``."""
    pairs = (text.split("=", 1) if "=" in text else (SHIPPED, text) for text in given)
    return {label: Path(path) for label, path in pairs}


def describe(policy: Policy) -> str:
    """A short description of a policy."""
    decided = "live rate" if policy.kind == "survival" else f"threshold {policy.threshold:g}"
    return f"version {policy.version}, {policy.kind}, {decided}, {policy.digest[:12]}"


def build(
    wanted: Sequence[str], policies: dict[str, Policy], has_drafter: bool, model_len: int
) -> tuple[Method, ...]:
    """The methods named ``wanted``.

    Args:
        policies: by label; a plain ``hybrid`` takes ``SHIPPED``.
        model_len: tokens of a model draft; ``arctic`` compares scores with it.

    Raises:
        SettingsError: a label is neither a number nor a policy.
        ModelError: a method needs a drafter and there is none.
    """
    methods = tuple(_one(name, policies, model_len) for name in wanted)
    drafting = [m.name for m in methods if m.model]
    if drafting and not has_drafter:
        raise ModelError(
            f"{', '.join(drafting)} need a drafter made for this model: name it with --drafter, or "
            "leave them out of --methods."
        )
    return methods


def _one(name: str, policies: dict[str, Policy], model_len: int) -> Method:
    from pipelines.replay.rivals import method

    match = NAME.fullmatch(name)
    base, label, factor = (match and match.group("base", "label", "factor")) or (name, None, None)
    number = float(label) if label and re.fullmatch(r"\d+(\.\d+)?", label) else None
    sound = (label or SHIPPED) in policies if base == LEARNED else label is None
    if not match or not (sound or (base in NUMBERED and number)):
        raise SettingsError(
            f"method {name!r}: behind ':' comes a label of --policy (of {LEARNED}) or a "
            f"number (of {', '.join(NUMBERED)}), behind '@' the factor of cache drafts."
        )
    if factor and not 0.0 < float(factor) <= 64.0:
        raise SettingsError(f"method {name!r}: {factor} is no factor above 0 and up to 64.")
    policy = policies[label or SHIPPED] if base == LEARNED else None
    built = method(base, policy=policy, threshold=number, k=int(number or model_len))
    own: dict[str, Any] = {"draft_factor": float(factor)} if factor else {}
    if base == "eagle3" and number:
        own["model_limit"] = int(number)
    return replace(built, name=name, **own)
