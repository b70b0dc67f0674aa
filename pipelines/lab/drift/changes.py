"""Recordings changed as a scenario says: arguments, wrong copies, sampling, another drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from decoder.contracts.features import FloatArray
from pipelines.replay.engine import Trace

Draw = np.random.Generator

ARGUMENTS: Final = 0.15
"""Share of a template's token types, the rarest ones, that are its arguments."""
OFTEN: Final = 25
"""A token type that comes more often than once in so many tokens is no identifier."""
CONTEXT: Final = 2
"""Tokens by which a drafter knows how a text has continued before."""


class Drafter(BaseModel):
    """Chances that the model drafter foresees a token, drawn anew for each.

    ``known`` holds where the text has continued so before, ``new`` elsewhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    known: float = Field(default=0.84, ge=0, le=1)
    new: float = Field(default=0.74, ge=0, le=1)


def filled_in(
    templates: Sequence[Trace], count: int, token_classes: FloatArray, draw: Draw
) -> list[Trace]:
    """``count`` requests that repeat ``templates``, each time with other arguments.

    Arguments are the token types of an output that are rarest among all templates; a request has
    its own in their place, in prompt and output alike, so that the prompt tells them.
    """
    texts = [np.concatenate([t.prompt, t.output]).astype(np.int32) for t in templates]
    often = np.bincount(np.concatenate(texts), minlength=len(token_classes))
    made: list[Trace] = []
    for index in range(count):
        place = int(draw.integers(len(templates)))
        template, text = templates[place], texts[place]
        types = np.unique(np.asarray(template.output[:-1], np.int32))
        rare = types[np.argsort(often[types], kind="stable")][: round(ARGUMENTS * len(types))]
        mapping = np.arange(len(token_classes), dtype=np.int32)
        for argument in rare.tolist():
            mapping[argument] = _of_class(argument, token_classes, draw)
        written, at = mapping[text], len(template.prompt)
        written[-1] = text[-1]
        session = f"{template.session}/{index}"
        made.append(
            replace(template, session=session, prompt=written[:at], output=written[at:],
                    model_accepted=None)
        )  # fmt: skip
    return made


def misleading(trace: Trace, every: int, token_classes: FloatArray, draw: Draw) -> Trace:
    """A request whose prompt holds its output, but for one token of ``every`` so many.

    Each copy of it is found, looks as good as any, and soon breaks off.
    """
    output = np.asarray(trace.output, np.int32)
    wrong = output.copy()
    at = np.arange(every - 1, len(wrong), every)
    wrong[at] = draw.integers(len(token_classes), size=len(at))
    prompt = np.concatenate([np.asarray(trace.prompt, np.int32), wrong])
    return replace(trace, prompt=prompt, output=output, model_accepted=None)


def renamed(trace: Trace, count: int, token_classes: FloatArray, draw: Draw) -> Trace:
    """A request whose prompt holds its output, ``count`` of its repeated token types renamed, each
    to one of the same class throughout, as identifiers are when code is edited.

    Copies break where a name comes, and go on behind it.
    """
    output = np.asarray(trace.output, np.int32)
    types, often = np.unique(output[:-1], return_counts=True)
    names = types[(often >= 2) & (often <= max(2, len(output) // OFTEN))]
    mapping = np.arange(len(token_classes), dtype=np.int32)
    for name in draw.permutation(names)[:count].tolist():
        mapping[name] = _of_class(name, token_classes, draw)
    prompt = np.concatenate([np.asarray(trace.prompt, np.int32), mapping[output]])
    return replace(trace, prompt=prompt, output=output, model_accepted=None)


def sampled(trace: Trace, chance: float, token_classes: FloatArray, draw: Draw) -> Trace:
    """``trace`` as sampling makes it: each output token but the last is, with such a ``chance``,
    another of its class, so that no copy reaches far. One output is drawn, whoever drafts."""
    output = np.array(trace.output, np.int32)
    for place in np.flatnonzero(draw.random(len(output) - 1) < chance).tolist():
        output[place] = _of_class(int(output[place]), token_classes, draw)
    return replace(trace, output=output, model_accepted=None)


def _of_class(token: int, token_classes: FloatArray, draw: Draw) -> int:
    """A token type of the same class, at random."""
    return int(draw.choice(np.flatnonzero((token_classes == token_classes[token]).all(axis=1))))


def foreseen(trace: Trace, drafter: Drafter, length: int, draw: Draw) -> Trace:
    """``trace`` with a model arm by the law of ``drafter``, drafts of ``length`` tokens."""
    prompt, output = np.asarray(trace.prompt, np.int64), np.asarray(trace.output, np.int64)
    text = np.concatenate([prompt, output])
    known = np.zeros(len(text), np.bool_)
    if len(text) > CONTEXT:
        types, ranks = np.unique(text, return_inverse=True)
        grams = np.zeros(len(text) - CONTEXT, np.int64)  # each a number: rows sort ten times slower
        for at in range(CONTEXT + 1):
            grams = grams * len(types) + ranks[at : len(grams) + at]
        first = np.unique(grams, return_index=True)[1]
        known[CONTEXT:] = True
        known[CONTEXT + first] = False
    chance = np.where(known[len(prompt) :], drafter.known, drafter.new)
    hits = draw.random(len(output)) < chance
    accepted = np.zeros(len(output), np.int32)
    run = 0
    for at in range(len(output) - 1, -1, -1):
        run = run + 1 if hits[at] else 0
        accepted[at] = min(run, length)
    return replace(trace, model_accepted=accepted)
