"""The CUDA graphs of a GPU's steps: a step is padded to the next one that was captured.

vLLM keeps full graphs, with attention in them, for steps in which each request has one number of
tokens, and rounds all sizes, those of other steps too, to multiples of it. With speculation that is
the longest draft and one more: with drafts of up to 64, a plain step of one request takes 65.
Steps whose requests all have the longest draft hardly occur here, and plain ones do all the time,
so we set the number to what it is without speculation.
"""

from __future__ import annotations

from typing import Any


def for_plain_steps(runner: Any) -> None:
    """Have vLLM's full graphs be of steps without drafts. To be called before it chooses them.

    By this number vLLM's runner and dispatcher choose sizes, make the steps that are captured, and
    tell which steps may run on them; it sizes no buffer. Mutates both; a mode or sizes that a
    person set stay.
    """
    runner.uniform_decode_query_len = 1
    runner.cudagraph_dispatcher.uniform_decode_query_len = 1


def sizes(runner: Any) -> tuple[int, ...]:
    """Sizes that a step is padded to, ascending; none where the engine captures no graphs."""
    config = runner.compilation_config
    if runner.device.type == "cpu" or not config.cudagraph_mode:
        return ()
    captured = sorted(set(config.cudagraph_capture_sizes or ()))
    return tuple(size for size in captured if size <= runner.max_num_tokens)
