"""What a scenario changes of recordings: the texts, and what the model drafter foresees of them.

All randomness is the caller's generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from decoder.contracts.features import FloatArray
from pipelines.lab.drift.scenario import Drafter
from pipelines.lab.replay.traces import Trace

Draw = np.random.Generator

ARGUMENTS: Final = 0.15
"""Share of a template's token types, the rarest ones, that are its arguments."""
CONTEXT: Final = 2
"""Tokens by which a drafter knows how a text has continued before."""


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
            alike = np.flatnonzero((token_classes == token_classes[argument]).all(axis=1))
            mapping[argument] = draw.choice(alike)
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


def foreseen(trace: Trace, drafter: Drafter, length: int, draw: Draw) -> Trace:
    """``trace`` with a model arm by the law of ``drafter``, drafts of ``length`` tokens."""
    prompt, output = np.asarray(trace.prompt, np.int64), np.asarray(trace.output, np.int64)
    text = np.concatenate([prompt, output])
    known = np.zeros(len(text), np.bool_)
    if len(text) > CONTEXT:
        grams = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
        first = np.unique(grams, axis=0, return_index=True)[1]
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
