"""Rounds as a worker plays them, with the noise of its steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from decoder.contracts.trials import Block, Round


def rounds(
    count: int,
    sides: Mapping[str, tuple[int, float]],
    *,
    scope: str = "scope01",
    life: str = "ab",
    first: int = 0,
    noise: float = 0.1,
    publication: int = 10**9,
    start: float = 1e9,
    seconds: float = 2.0,
    wall: float = 1.0,
) -> list[Round]:
    """``count`` rounds of ``sides``: version and rate of each, as a multiple of the same.

    Args:
        noise: standard deviation of a block's rate, relative.
        start, seconds: when the first ends, in seconds since the epoch, and how long each takes.
        wall: wall time over time at the costs in force, of every side but the champion.
    """
    return [
        Round(
            scope=scope, worker="w", life=life, number=number,
            time=start + seconds * number, unit=number,
            blocks=tuple(
                _block(side, version, rate, publication, wall, noise, number)
                for side, (version, rate) in sides.items()
            ),
        )
        for number in range(first, first + count)
    ]  # fmt: skip


def _block(
    side: str, version: int, rate: float, publication: int, wall: float, noise: float, number: int
) -> Block:
    draw = np.random.default_rng([number, *side.encode()])
    cost = 1e6 / rate * float(np.exp(noise * draw.normal()))
    return Block(
        side=side, version=version, publication=publication, steps=32, requests=2, tokens=100,
        us=cost * (1.0 if side == "champion" else wall), cost_us=cost,
    )  # fmt: skip
