"""From lists between commas, as behind ``--methods`` and ``--policy``, to decoding methods.

``frequency:4`` is the frequency rule at a score of 4, ``arctic:3`` works alike with its ``k``,
``eagle3:2`` drafts two tokens, and ``hybrid:paper`` decides by the bundle that was named with
``--policy paper=FILE``. ``suffix@2`` (behind a label, if there is one) lets a cache draft have two
tokens for each one matched: the baselines have one, Table 7 of the paper, and ``hybrid`` what the
worker is set to.
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
"""Label of the policy that ``hybrid`` without a label decides by: the first policy, unless another
is named."""
NAME: Final = re.compile(r"(?P<base>[^:@]+)(:(?P<label>[^@]+))?(@(?P<factor>\d+(\.\d+)?))?")


def words(text: str) -> tuple[str, ...]:
    """The words between the commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """The positive numbers between the commas, each once.

    Raises:
        SettingsError: none, or something else.
    """
    found = words(text)
    if not found or not all(word.isdecimal() and int(word) for word in found):
        raise SettingsError(f"{option} {text!r}: give positive numbers with commas between them.")
    return tuple(int(word) for word in found)


def names(text: str) -> tuple[str, ...]:
    """The method names in ``text``, separated by commas, each once.

    Raises:
        SettingsError: there is none, or one is unknown.
    """
    from pipelines.replay.rivals import METHODS

    found = words(text)
    unknown = [name for name in found if re.split("[:@]", name)[0] not in METHODS]
    if unknown or not found:
        said = ", ".join(unknown) or "was named"
        raise SettingsError(f"no method {said}: there are {', '.join(METHODS)}.")
    return found


def policy_files(given: Sequence[str]) -> dict[str, Path]:
    """Bundles by label: ``FILE`` stands for ``hybrid`` itself, ``label=FILE`` for that label."""
    pairs = (text.split("=", 1) if "=" in text else (SHIPPED, text) for text in given)
    return {label: Path(path) for label, path in pairs}


def describe(policy: Policy) -> str:
    """A policy in a few words, for the settings of a run."""
    decided = "live rate" if policy.kind == "survival" else f"threshold {policy.threshold:g}"
    return f"version {policy.version}, {policy.kind}, {decided}, {policy.digest[:12]}"


def build(
    wanted: Sequence[str], policies: dict[str, Policy], has_drafter: bool, model_len: int
) -> tuple[Method, ...]:
    """The methods called ``wanted``.

    Args:
        policies: by label; ``hybrid`` without a label takes ``SHIPPED``.
        model_len: tokens of the drafter's chain; ``arctic`` compares scores with it.

    Raises:
        SettingsError: a label is neither a number nor a policy.
        ModelError: a method drafts with a model and there is no drafter.
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

    said = NAME.fullmatch(name)
    base, label, factor = (said and said.group("base", "label", "factor")) or (name, None, None)
    number = float(label) if label and re.fullmatch(r"\d+(\.\d+)?", label) else None
    sound = (label or SHIPPED) in policies if base == LEARNED else label is None
    if not said or not (sound or (base in NUMBERED and number)):
        raise SettingsError(
            f"method {name!r}: behind ':' comes a label of --policy (of {LEARNED}) or a "
            f"number (of {', '.join(NUMBERED)}), behind '@' the factor of cache drafts."
        )
    if factor and not 0.0 < float(factor) <= 64.0:
        raise SettingsError(f"method {name!r}: {factor} is no factor above 0 and up to 64.")
    policy = policies[label or SHIPPED] if base == LEARNED else None
    made = method(base, policy=policy, threshold=number, k=int(number or model_len))
    own: dict[str, Any] = {"draft_factor": float(factor)} if factor else {}
    if base == "eagle3" and number:
        own["model_limit"] = int(number)
    return replace(made, name=name, **own)
