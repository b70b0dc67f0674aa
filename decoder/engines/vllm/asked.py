"""What the router is told of a request: its text so far, and what it asked for."""

from __future__ import annotations

from typing import Any, Final

from decoder.core.requests import RequestOptions
from decoder.drafting.drafts import Tokens
from decoder.tenancy.identities import Identities

_OFF: Final = ("off", "false", "0", "no")


def text_of(state: Any, ids: Tokens, sampled: int) -> tuple[Tokens, tuple[int, ...]] | None:
    """A request's text before the step, prompt and output, of a vLLM ``CachedRequestState`` that
    holds the step's ``sampled`` tokens already.

    ``ids`` is its row of the input batch, int32, which begins with the prompt: to make an array of
    a list of 128k tokens takes milliseconds. The prompt is a view of it.

    None where there is none to copy from, or no policy for what it is: a prompt of embeddings, or a
    request to an adapter.
    """
    unknown = state.prompt_token_ids is None or state.prompt_embeds is not None
    if unknown or state.prompt_is_token_ids is not None or state.lora_request is not None:
        return None
    before = len(state.output_token_ids) - sampled
    return ids[: len(state.prompt_token_ids)], tuple(state.output_token_ids[:before])


def options_of(
    name: str, parameters: Any, max_model_len: int, identities: Identities
) -> RequestOptions:
    """What vLLM's ``SamplingParams`` say to the router, of the request that vLLM calls ``name``."""
    extra = parameters.extra_args or {}
    # Not ``all_stop_token_ids``: with ignore_eos that still holds the ends vLLM goes on past.
    stops = {*(parameters.stop_token_ids or ()), parameters.eos_token_id} - {None}
    choice, asked = choice_of(name)
    identity = identities.of(extra, asked)
    return RequestOptions(
        max_tokens=parameters.max_tokens or max_model_len,
        max_model_len=max_model_len,
        stop_ids=frozenset(stops),
        tenant=identity.tenant,
        workload=identity.workload,
        # vLLM counts thinking as it was before a draft, in which it may begin or end.
        speculate=parameters.thinking_token_budget is None
        and str(extra.get("hvd_speculate", "on")).lower() not in _OFF,
        opaque=identity.request,
        session=identity.session,
        choice=choice,
        cache_key=identity.key,
        min_tokens=parameters.min_tokens,
    )


def choice_of(name: str) -> tuple[int, str]:
    """Which choice a request is, and what its client's request is called.

    vLLM makes a request of each of several choices, called ``0_...``, ``1_...`` and so on.
    """
    number, found, asked = name.partition("_")
    if found and number.isdecimal() and number.isascii() and len(number) < 5:
        return int(number), asked
    return 0, name
