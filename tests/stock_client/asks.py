"""What a stock client asks of both servers: the matrix's requests, each whole and in pieces.

Left out are those whose client goes away, and those about names of requests. What is drawn with a
seed is asked a second time without drafts: then it must come out as it does from plain vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.matrix.asks import Ask, everything, without_speculation

LEFT_OUT: Final = ("leave", "ids", "edge")
NOT_IN_PIECES: Final = "prompt_logprobs"
"""A field that vLLM refuses in a request for a stream."""


def all_asks() -> list[Ask]:
    """Requests in one fixed order, with fields that a client of OpenAI's sends, or vLLM's own.

    Those that are not ``exact`` go on to their limit, so that only their tokens are drawn.
    """
    asked: list[Ask] = []
    for number, ask in enumerate(a for a in everything() if a.kind not in LEFT_OUT):
        if ask.exact or "ignore_eos" in ask.body:
            asked += _both_ways(ask)
        if "seed" in ask.body:
            alone = replace(without_speculation(ask), name=f"drawn-{number}", exact=True)
            asked += _both_ways(alone)
    return asked


def _both_ways(ask: Ask) -> list[Ask]:
    """Answered whole, and in pieces; but for what is refused: in pieces vLLM logs a traceback."""
    body = {k: v for k, v in ask.body.items() if k not in ("return_token_ids", "stream")}
    whole = replace(ask, body={**body, "stream": False})
    if NOT_IN_PIECES in body or ask.kind == "refused":
        return [whole]
    further = {"stream": True, "stream_options": {"include_usage": True}}
    return [whole, replace(ask, name=f"{ask.name}-in-pieces", body={**body, **further})]
