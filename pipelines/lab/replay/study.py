"""The whole of ``hvd replay``: sets of recordings, a policy, and every rule on each set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import SettingsError, TraceError
from learner.rows import joined
from pipelines.lab.replay import recording
from pipelines.lab.replay.engine import Simulator
from pipelines.lab.replay.rules import ruled, summary
from pipelines.lab.replay.split import Parts, split
from pipelines.lab.replay.traces import read
from pipelines.lab.replay.training import (
    paper,
    survival,
    taught,
    teachers,
    with_longer_drafts,
)
from pipelines.progress import Step
from pipelines.prompts import fitting, read_folder

CONTEXT: Final = 16_384
"""Tokens that a prompt and its output may have."""
PROMPTS: Final = 12
"""Prompts recorded of each set, unless more are asked for."""
Sets = Mapping[str, Parts]


def of_files(
    paths: Sequence[Path], tokenizer: Any, limit: int | None, notices: list[str], step: Step
) -> Sets:
    """Each of ``paths``, split; one that holds too little, or cannot be read, costs a notice.

    Raises:
        TraceError: not one can be used.
    """
    sets = dict[str, Parts]()
    for path in paths:
        try:
            found = read(path, tokenizer, CONTEXT, partial(step, f"reading {path.name}"))
        except TraceError as error:
            notices.append(str(error))
            continue
        notices += found.notices + found.too_long
        parts = split(found.traces, limit=limit)
        if parts.train and parts.test:
            sets[str(path) if path.stem in sets else path.stem] = parts
        else:
            side = "test" if parts.train else "training"
            notices.append(f"{path}: left out, none of its sessions falls to {side}.")
    if not sets:
        raise TraceError(f"nothing to measure: {notices[-1]}")
    return sets


def of_prompts(
    folder: Path, tokenizer: Any, limit: int | None, notices: list[str], step: Step
) -> Sets:
    """The embedded model's answers to the first ``limit`` prompts of each set in ``folder``, cut in
    their middle where they are too long; recorded where that was not done.

    Raises:
        SettingsError: there is no such folder, or no prompt in it that can be used.
    """
    plan, wanted = recording.Plan(), dict[str, list[tuple[int, ...]]]()
    for each in read_folder(folder, (), notices):
        fits = fitting(each, tokenizer, plan.prompt, "truncate", notices.append)
        if ids := [prompt.ids for prompt in itertools.islice(fits, limit or PROMPTS)]:
            wanted[each.name] = ids
    if not wanted:
        raise SettingsError(f"no prompt in {folder} can be used: {notices[-1:]}")
    kept = recording.record(wanted, plan, step)
    notices.append(f"The recordings are in {kept}.")
    return {n: Parts([], [], recording.traces_of(kept, n, ids)) for n, ids in wanted.items()}


def trained(
    sets: Sets, kind: Literal["payoff", "survival"], simulator: Simulator, step: Step
) -> Policy:
    """The policy that the training sessions of all ``sets`` make.

    Raises:
        TraceError: too few labelled drafts.
    """
    step("decoding what is learned from", 0, 1)
    parts = sets.values()
    if kind == "survival":
        longer = with_longer_drafts(simulator)
        return survival(joined([taught(longer, p.train, p.warm_up) for p in parts]), "replay")
    counting = teachers()[1]
    seen = [simulator.decode(p.train, counting, p.warm_up)[1] for p in parts]
    return paper(joined(seen), "replay", step)


def replayed(
    sets: Sets, policy: Policy, simulator: Simulator, step: Step,
    router_us: Callable[[str], float] = lambda rule: 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The test sessions of ``sets`` by every rule; plain JSON."""
    found = {}
    for done, (name, parts) in enumerate(sets.items()):
        step(f"decoding {name}", done, len(sets))
        found[name] = ruled(parts.test, policy, simulator, parts.warm_up, router_us)
    counts = {name: {"sessions": len({t.session for t in parts.test}),
                     "generations": len(parts.test)} for name, parts in sets.items()}  # fmt: skip
    return {"sets": counts, **summary(found)}
