"""What a scenario changes of recordings: the texts, and what the model drafter foresees of them.

A change of outputs is carried into the prompts of later turns, which hold them. All randomness is
the caller's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.features import FloatArray
from pipelines.drift.scenario import Drafter
from pipelines.replay.tokenise import Ids
from pipelines.replay.traces import Trace

Draw = np.random.Generator
Change = Callable[[Ids], Ids]

SPAN: Final = 3.0
"""Mean tokens for which an output that left its recording stays away from it."""
ARGUMENTS: Final = 0.15
"""Share of a template's token types, the rarest ones, that are its arguments."""
CONTEXT: Final = 2
"""Tokens by which a drafter knows how a text has continued before."""


def changed(turns: Sequence[Trace], change: Change) -> list[Trace]:
    """The turns of one session with ``change`` made to each output, which keeps its length."""
    made: list[Trace] = []
    known = now = np.zeros(0, np.int32)
    for turn in turns:
        prompt, output = np.asarray(turn.prompt, np.int32), np.asarray(turn.output, np.int32)
        shown = prompt
        if len(known) and np.array_equal(prompt[: len(known)], known):
            shown = np.concatenate([now, prompt[len(known) :]])
        written = change(output)
        known, now = np.concatenate([prompt, output]), np.concatenate([shown, written])
        made.append(replace(turn, prompt=shown, output=written, model_accepted=None))
    return made


def diverging(rate: float, donors: Sequence[Trace], draw: Draw) -> Change:
    """Outputs that leave their recording with chance ``rate`` at each token, for ``SPAN`` tokens.

    It is what sampling does to copies, seen from the drafts: somewhere the text goes on otherwise,
    here as some other output does, and comes back. The last token, which ends a turn, stays.
    """

    def change(output: Ids) -> Ids:
        made = output.copy()
        for at in np.flatnonzero(draw.random(len(output) - 1) < rate).tolist():
            donor = np.asarray(donors[int(draw.integers(len(donors)))].output, np.int32)
            begin = int(draw.integers(len(donor)))
            span = donor[begin : begin + int(draw.geometric(1.0 / SPAN))]
            span = span[: len(made) - 1 - at]
            made[at : at + len(span)] = span
        return made

    return change


def exchanged(types: Ids, token_classes: FloatArray, draw: Draw) -> NDArray[np.int32]:
    """A map of all token ids that exchanges ``types`` among those of equal token classes."""
    mapping = np.arange(len(token_classes), dtype=np.int32)
    kinds = np.unique(token_classes[types], axis=0, return_inverse=True)[1].ravel()
    for kind in range(kinds.max(initial=-1) + 1):
        alike = draw.permutation(types[kinds == kind])
        mapping[alike] = np.roll(alike, 1)
    return mapping


def renamed(share: float, token_classes: FloatArray, draw: Draw) -> Change:
    """Outputs of a target that writes ``share`` of all token types otherwise, always alike."""
    size = len(token_classes)
    types = draw.permutation(size)[: round(share * size)].astype(np.int32)
    mapping = exchanged(types, token_classes, draw)

    def change(output: Ids) -> Ids:
        return np.concatenate([mapping[output[:-1]], output[-1:]])

    return change


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
